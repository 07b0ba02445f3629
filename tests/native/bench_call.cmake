# The cost of one expert call, for scripts/bench.
add_executable(swarm-bench-call "${CMAKE_CURRENT_LIST_DIR}/bench_call.cpp")
target_link_libraries(swarm-bench-call PRIVATE swarm_transport)
