# The router's side of the expert call, without ggml: an object library for the Swarm backend and the
# transport's tests. Wants SWARM_LLAMA_CPP_SOURCE (for vendor/nlohmann/json.hpp).

find_package(Threads REQUIRED)

add_library(swarm_transport OBJECT)
foreach(name brief_poll call_proof caller control exchange floats handshake msgpack net peer routing split statistics trace websocket wire)
    target_sources(swarm_transport PRIVATE "${CMAKE_CURRENT_LIST_DIR}/${name}.cpp")
endforeach()
target_include_directories(swarm_transport PUBLIC "${CMAKE_CURRENT_LIST_DIR}")
target_include_directories(swarm_transport SYSTEM PRIVATE "${SWARM_LLAMA_CPP_SOURCE}/vendor")
target_compile_features(swarm_transport PUBLIC cxx_std_17)
target_compile_options(swarm_transport PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Werror)
set_target_properties(swarm_transport PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
target_link_libraries(swarm_transport PUBLIC Threads::Threads)
if(SWARM_SANITIZE)
    target_compile_options(swarm_transport PUBLIC -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
    target_link_options(swarm_transport PUBLIC -fsanitize=address,undefined)
endif()
