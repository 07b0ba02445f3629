# The tests' oracle: libllama's logits, with stock buffers or with the experts elsewhere.
add_executable(swarm-logits "${CMAKE_CURRENT_LIST_DIR}/logits.cpp")
target_link_libraries(swarm-logits PRIVATE llama ggml)
