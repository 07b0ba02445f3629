#pragma once
// A small layer in a file, a call for it, and what an error says: for the tests of the expert store.

#include "expert_server/expert_store.hpp"
#include "common/program.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace swarm;

inline const char * const program_text =
    "swarm-program 1\n"
    "input row\n"
    "%0 = matmul ffn_up_exps.weight h\n"
    "%1 = bias ffn_up_exps.bias %0\n"
    "%2 = cut %1 0 64\n"
    "%3 = cut %1 64 64\n"
    "%4 = glu swiglu_oai %2 %3 0x1.b3b646p+0 0x1.cp+2\n"
    "%5 = unary relu %4\n"
    "%6 = sqr %5\n"
    "%7 = clamp %6 -inf 0x1p+3\n"
    "%8 = scale %7 0x1p-1 0x0p+0\n"
    "%9 = matmul ffn_down_exps.weight %8\n"
    "%10 = gather ffn_down_exps.scale\n"
    "%11 = mul %9 %10\n"
    "%12 = mul %11 w\n"
    "return %12\n";

constexpr int n_expert = 6, n_in = 32, n_up = 128, n_half = 64, n_out = 48;

struct Weights {
    std::string path = std::string(std::getenv("TMPDIR") != nullptr ? std::getenv("TMPDIR") : "/tmp") + "/test_store." +
                       std::to_string(getpid()) + ".weights";
    std::map<std::string, TensorParts> tensors;

    // Experts first … last of every tensor, as they lie in the file.
    explicit Weights(int first = 1, int last = 3) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal(0.0f, 0.2f);
        std::ofstream file(path, std::ios::binary);
        uint64_t offset = 0;
        const auto add = [&](const char * name, std::vector<int64_t> ne) {
            size_t one = sizeof(float);
            for (const int64_t n : ne) {
                one *= size_t(n);
            }
            for (size_t i = 0; i < one / sizeof(float) * n_expert; i++) {
                const float value = normal(random);
                file.write(reinterpret_cast<const char *>(&value), sizeof(value));
            }
            tensors[name] = {
                "f32", std::move(ne), {{path, offset + one * size_t(first), one * size_t(last - first + 1)}}};
            offset += one * n_expert;
        };
        add("ffn_up_exps.weight", { n_in, n_up });
        add("ffn_up_exps.bias", { n_up });
        add("ffn_down_exps.weight", { n_half, n_out });
        add("ffn_down_exps.scale", {});
    }
    ~Weights() { std::remove(path.c_str()); }
};

struct Call {
    std::vector<float>   h = std::vector<float>(2 * n_in, 0.5f);
    std::vector<int32_t> row{ 0, 0, 1 };
    std::vector<int32_t> expert{ 3, 1, 2 };
    std::vector<float>   weight{ 0.5f, 0.25f, 1.0f };
    FfnCall              call;

    explicit Call(Reduce reduce = Reduce::rows) {
        call.layer          = 4;
        call.program_digest = Program::parse(program_text).digest();
        call.h              = h.data();
        call.n_h            = 2;
        call.n_in           = n_in;
        call.row            = row.data();
        call.expert         = expert.data();
        call.weight         = weight.data();
        call.n_pairs        = 3;
        call.n_rows         = 2;
        call.reduce         = reduce;
    }
};

template <typename Error, typename Body> std::string error_of(Body body) {
    try {
        body();
    } catch (const Error & error) {
        return error.what();
    }
    return "no error of the expected kind";
}
