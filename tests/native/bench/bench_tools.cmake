# What scripts/bench needs besides llama.cpp's own programs.
add_executable(swarm-bench-call "${CMAKE_CURRENT_LIST_DIR}/bench_call.cpp")
target_link_libraries(swarm-bench-call PRIVATE swarm_router swarm_common)

add_executable(swarm-bench-relay "${CMAKE_CURRENT_LIST_DIR}/bench_relay.cpp")
target_link_libraries(swarm-bench-relay PRIVATE swarm_router swarm_common)
