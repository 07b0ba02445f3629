# llama.cpp's own generator of tiny random models, one per architecture, with 8 experts of which 3
# are used instead of 2 of 2: with every expert used, a wrong choice of experts would go unseen.

file(READ "${SWARM_LLAMA_CPP_SOURCE}/tests/test-llama-archs.cpp" text)
foreach(pair "EXPERT_COUNT,               uint32_t(2)|EXPERT_COUNT,               uint32_t(8)"
             "EXPERT_USED_COUNT,          uint32_t(2)|EXPERT_USED_COUNT,          uint32_t(3)")
    string(REPLACE "|" ";" pair "${pair}")
    list(GET pair 0 old)
    list(GET pair 1 new)
    string(FIND "${text}" "${old}" position)
    if(position EQUAL -1)
        message(FATAL_ERROR "swarm-node: tests/test-llama-archs.cpp of this llama.cpp has no '${old}'; "
                            "adapt kernels/cmake/fixtures.cmake to its version")
    endif()
    string(REPLACE "${old}" "${new}" text "${text}")
endforeach()
string(REPLACE "\"../src/" "\"${SWARM_LLAMA_CPP_SOURCE}/src/" text "${text}")
set(generated "${CMAKE_BINARY_DIR}/fixtures/test-llama-archs.cpp")
file(CONFIGURE OUTPUT "${generated}" CONTENT "${text}" @ONLY)
add_executable(test-llama-archs "${generated}")
target_link_libraries(test-llama-archs PRIVATE llama-common llama)
