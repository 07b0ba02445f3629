// The layer program and the expert store under sanitizers: what a message or a file can get wrong, and mutated text.
// Linked with the build's ggml libraries.

#include "common/check.hpp"
#include "expert_server/store_rig.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace swarm;

TEST(program_text_is_canonical) {
    const Program program = Program::parse(program_text);
    CHECK(program.text() == program_text);
    CHECK(program.uses_weight());
    CHECK(program.tensors().size() == 4);
}

TEST(mutated_program_text_parses_or_is_refused) {
    std::mt19937 random(7);
    const std::string original = program_text;
    const std::string alphabet = "%0123456789 .=hwx-\n\tabcdefinput_" + std::string(1, '\0') + "\xff";
    int accepted = 0;
    for (int i = 0; i < 100000; i++) {
        std::string text = original;
        for (unsigned n = 1 + random() % 3; n > 0; n--) {
            const size_t at = random() % text.size();
            switch (random() % 4) {
                case 0: text[at] = alphabet[random() % alphabet.size()]; break;
                case 1: text.erase(at, 1 + random() % 8); break;
                case 2: text.insert(at, 1, alphabet[random() % alphabet.size()]); break;
                default: text.insert(at, text.substr(random() % text.size(), random() % 40)); break;
            }
            if (text.empty()) {
                text = "x";
            }
        }
        try {
            const Program program = Program::parse(text);
            accepted++;
            CHECK(program.text() == text);
        } catch (const ProgramError &) {
        }
    }
    CHECK(accepted > 0);
}

TEST(a_slice_computes) {
    const Weights weights;
    ExpertStore store("CPU", 1);
    const SliceInfo info = store.load(4, Program::parse(program_text), 1, 3, n_expert, weights.tensors);
    CHECK(info.n_in == n_in && info.n_out == n_out);
    const Call rows;
    std::vector<float> y(3 * n_out);
    store.ffn(rows.call, y.data());
    const Call sum(Reduce::sum);
    std::vector<float> total(2 * n_out);
    store.ffn(sum.call, total.data());
    for (int i = 0; i < n_out; i++) {
        CHECK(std::isfinite(y[size_t(i)]));
        CHECK(total[size_t(i)] == y[size_t(i)] + y[size_t(n_out + i)]);
        CHECK(total[size_t(n_out + i)] == y[size_t(2 * n_out + i)]);
    }
    store.drop(4, 1, 3);
    CHECK_CONTAINS(error_of<NotHeld>([&] { store.ffn(rows.call, y.data()); }), "layer 4");
}

TEST(wrong_calls_are_refused_and_the_store_lives) {
    const Weights weights;
    ExpertStore store("CPU", 1);
    store.load(4, Program::parse(program_text), 1, 3, n_expert, weights.tensors);
    std::vector<float> y(3 * n_out);
    const auto refused = [&](auto change, const char * text) {
        Call c;
        change(c);
        CHECK_CONTAINS(error_of<std::exception>([&] { store.ffn(c.call, y.data()); }), text);
    };
    refused([](Call & c) { c.expert[0] = -1; }, "expert -1");
    refused([](Call & c) { c.expert[0] = n_expert; }, "expert 6");
    refused([](Call & c) { c.expert[0] = 0; }, "expert 0 is not held");
    refused([](Call & c) { c.expert[1] = 3; }, "twice");
    refused([](Call & c) { c.row[2] = 2; }, "row index 2");
    refused([](Call & c) { c.row[0] = 1; }, "descends");
    refused([](Call & c) { c.row[0] = -1; }, "row index -1");
    refused([](Call & c) { c.call.n_in = n_in - 1; }, "rows of 31 values");
    refused([](Call & c) { c.call.n_h = 3; }, "3 input rows");
    refused([](Call & c) { c.call.weight = nullptr; }, "needs gate weights");
    refused([](Call & c) { c.call.layer = 5; }, "layer 5");
    refused([](Call & c) { c.call.program_digest++; }, "program");
    refused([](Call & c) { c.h[5] = std::numeric_limits<float>::quiet_NaN(); }, "not finite");
    refused([](Call & c) { c.weight[1] = std::numeric_limits<float>::infinity(); }, "not finite");
    const Call good;
    store.ffn(good.call, y.data());
}

TEST(wrong_loads_are_refused) {
    const Weights weights;
    ExpertStore store("CPU", 1);
    const Program program = Program::parse(program_text);
    const auto refused = [&](auto change, const char * text) {
        auto tensors = weights.tensors;
        change(tensors);
        CHECK_CONTAINS(error_of<LoadError>([&] { store.load(4, program, 1, 3, n_expert, tensors); }), text);
    };
    refused([](auto & t) { t.erase("ffn_up_exps.bias"); }, "'ffn_up_exps.bias'");
    refused([](auto & t) { t["ffn_up_exps.weight"].ne = { n_in, n_up + 1 }; }, "does not fit");
    refused([](auto & t) { t["ffn_up_exps.weight"].ne = { -1, n_up }; }, "impossible dimensions");
    refused([](auto & t) { t["ffn_up_exps.weight"].ne = { n_in }; }, "dimensions per expert");
    refused([](auto & t) { t["ffn_up_exps.weight"].type = "q4_K"; }, "whole blocks");
    refused([](auto & t) { t["ffn_up_exps.weight"].type = "q9_Z"; }, "q9_Z");
    refused([](auto & t) { t["ffn_up_exps.bias"].type = "f16"; }, "must be f32");
    refused([](auto & t) { t["ffn_up_exps.weight"].parts[0].bytes--; }, "bytes");
    refused([](auto & t) { t["ffn_up_exps.weight"].parts[0].offset = 1 << 30; }, "not complete");
    refused([](auto & t) { t["ffn_up_exps.weight"].parts[0].path = "/nonexistent"; }, "/nonexistent");
    store.load(4, program, 1, 3, n_expert, weights.tensors);
    CHECK_CONTAINS(error_of<LoadError>([&] { store.load(4, program, 3, 3, n_expert, weights.tensors); }), "overlaps");
}
