// swarm-programs: prints the layer programs of a model, as llama.cpp builds them, without loading its weights.
// Output: docs/protocol.md, "Layer program".

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <nlohmann/json.hpp>

namespace {

void print_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

int fail(const std::string & message) {
    std::fprintf(stderr, "swarm-programs: %s\n", message.c_str());
    return 1;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        return fail(
            "usage: swarm-programs MODEL.gguf TENSOR_PATTERN (with GGML_BACKEND_PATH naming the Swarm backend)");
    }
    llama_log_set(print_errors, nullptr);
    ggml_backend_load_all();
    const ggml_backend_dev_t device = ggml_backend_dev_by_name("Swarm");
    if (device == nullptr) {
        return fail("the Swarm backend is not loaded; GGML_BACKEND_PATH must name libggml-swarm.so of this build");
    }
    using get_programs = const char * (*)();
    const auto programs = reinterpret_cast<get_programs>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "swarm_programs_json"));
    if (programs == nullptr) {
        return fail("the device named Swarm is not this build's");
    }
    const llama_model_tensor_buft_override overrides[] = { { argv[2], ggml_backend_dev_buffer_type(device) },
                                                           { nullptr, nullptr } };
    llama_model_params model_params    = llama_model_default_params();
    model_params.tensor_buft_overrides = overrides;
    model_params.no_alloc              = true;
    model_params.load_mode             = LLAMA_LOAD_MODE_NONE;
    model_params.n_gpu_layers          = 0;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) {
        return fail(std::string("llama.cpp cannot load '") + argv[1] + "'");
    }
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx    = 512;
    context_params.n_batch  = 64;
    context_params.n_ubatch = 64;
    llama_context * context = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        llama_model_free(model);
        return fail(std::string("llama.cpp cannot make a context for '") + argv[1] + "'");
    }
    nlohmann::ordered_json document = nlohmann::ordered_json::parse(programs());
    document["n_layer"] = llama_model_n_layer(model);
    document["n_embd"]  = llama_model_n_embd(model);
    std::printf("%s\n", document.dump(1).c_str());
    llama_free(context);
    llama_model_free(model);
    return document["refused"].empty() ? 0 : 3;
}
