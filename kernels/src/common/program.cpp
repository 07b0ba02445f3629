#include "common/program.hpp"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

namespace swarm {

namespace {

struct KindName {
    int          kind;
    const char * name;
};

constexpr KindName glu_kinds[] = {
    { GGML_GLU_OP_REGLU,       "reglu" },       { GGML_GLU_OP_GEGLU,        "geglu" },
    { GGML_GLU_OP_SWIGLU,      "swiglu" },      { GGML_GLU_OP_SWIGLU_OAI,   "swiglu_oai" },
    { GGML_GLU_OP_GEGLU_ERF,   "geglu_erf" },   { GGML_GLU_OP_GEGLU_QUICK,  "geglu_quick" },
    { GGML_GLU_OP_SWIGLU_CLAMP, "swiglu_clamp" },
};

constexpr KindName unary_kinds[] = {
    { GGML_UNARY_OP_SILU, "silu" },       { GGML_UNARY_OP_GELU, "gelu" },
    { GGML_UNARY_OP_GELU_QUICK, "gelu_quick" }, { GGML_UNARY_OP_GELU_ERF, "gelu_erf" },
    { GGML_UNARY_OP_RELU, "relu" },       { GGML_UNARY_OP_TANH, "tanh" },
    { GGML_UNARY_OP_SIGMOID, "sigmoid" }, { GGML_UNARY_OP_ABS, "abs" },
    { GGML_UNARY_OP_NEG, "neg" },         { GGML_UNARY_OP_EXP, "exp" },
    { GGML_UNARY_OP_SOFTPLUS, "softplus" },
};

template <size_t N> const char * kind_name(const KindName (&kinds)[N], int kind) {
    for (const KindName & k : kinds) {
        if (k.kind == kind) {
            return k.name;
        }
    }
    return nullptr;
}

template <size_t N> int kind_value(const KindName (&kinds)[N], const std::string & name) {
    for (const KindName & k : kinds) {
        if (name == k.name) {
            return k.kind;
        }
    }
    return -1;
}

bool glu_has_parameters(int kind) {
    return kind == GGML_GLU_OP_SWIGLU_OAI || kind == GGML_GLU_OP_SWIGLU_CLAMP;
}

std::string operand(int value) {
    if (value == operand_h) {
        return "h";
    }
    if (value == operand_w) {
        return "w";
    }
    return "%" + std::to_string(value);
}

std::string number(float value) {
    char buffer[64];
    std::snprintf(buffer, sizeof(buffer), "%a", static_cast<double>(value));
    return buffer;
}

std::string step_text(const Step & s) {
    switch (s.op) {
        case StepOp::matmul: {
            std::string text = "matmul " + s.tensor + " " + operand(s.x);
            if (s.prec[0] != 0 || s.prec[1] != 0) {
                text += " prec=" + std::to_string(s.prec[0]) + "," + std::to_string(s.prec[1]);
            }
            return text;
        }
        case StepOp::bias:   return "bias " + s.tensor + " " + operand(s.x);
        case StepOp::gather: return "gather " + s.tensor;
        case StepOp::cut:
            return "cut " + operand(s.x) + " " + std::to_string(s.offset) + " " + std::to_string(s.length);
        case StepOp::glu: {
            std::string text = std::string("glu ") + glu_kind_name(s.kind) + " " + operand(s.x) + " " + operand(s.y);
            return glu_has_parameters(s.kind) ? text + " " + number(s.a) + " " + number(s.b) : text;
        }
        case StepOp::unary:  return std::string("unary ") + unary_kind_name(s.kind) + " " + operand(s.x);
        case StepOp::sqr:    return "sqr " + operand(s.x);
        case StepOp::scale:  return "scale " + operand(s.x) + " " + number(s.a) + " " + number(s.b);
        case StepOp::clamp:  return "clamp " + operand(s.x) + " " + number(s.a) + " " + number(s.b);
        case StepOp::mul:    return "mul " + operand(s.x) + " " + operand(s.y);
        case StepOp::add:    return "add " + operand(s.x) + " " + operand(s.y);
    }
    throw ProgramError("a step of no known kind");
}

// One line of program text, read word by word. Every message carries the line.
class LineReader {
  public:
    LineReader(const std::string & line, size_t number) : line_(line), number_(number) {
        std::istringstream stream(line);
        for (std::string word; stream >> word;) {
            words_.push_back(std::move(word));
        }
        std::string joined;
        for (const std::string & word : words_) {
            joined += joined.empty() ? word : " " + word;
        }
        if (joined != line) {
            fail("words must be separated by single blanks");
        }
    }

    [[noreturn]] void fail(const std::string & what) const {
        throw ProgramError("layer program, line " + std::to_string(number_) + ": " + what + " in '" + line_ + "'");
    }

    size_t left() const { return words_.size() - next_; }

    std::string word(const char * what) {
        if (left() == 0) {
            fail(std::string("missing ") + what);
        }
        return words_[next_++];
    }

    std::string name() {
        std::string text = word("tensor name");
        const bool valid = text.size() <= Program::max_name && std::all_of(text.begin(), text.end(), [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
        });
        if (!valid) {
            fail("bad tensor name '" + text.substr(0, Program::max_name) + "'");
        }
        return text;
    }

    int64_t integer(const char * what) {
        const std::string text = word(what);
        char * end = nullptr;
        errno = 0;
        const long long value = std::strtoll(text.c_str(), &end, 10);
        if (errno != 0 || *end != '\0' || end == text.c_str() || std::to_string(value) != text) {
            fail(std::string("bad ") + what + " '" + text + "'");
        }
        return value;
    }

    float real(const char * what) {
        const std::string text = word(what);
        char * end = nullptr;
        const float value = std::strtof(text.c_str(), &end);
        if (*end != '\0' || end == text.c_str() || std::isnan(value) || number(value) != text) {
            fail(std::string("bad ") + what + " '" + text + "'");
        }
        return value;
    }

    int operand(size_t n_steps) {
        const std::string text = word("operand");
        if (text == "h") {
            return operand_h;
        }
        if (text == "w") {
            return operand_w;
        }
        if (text.size() > 1 && text.size() < 8 && text[0] == '%') {
            char * end = nullptr;
            const long value = std::strtol(text.c_str() + 1, &end, 10);
            if (*end == '\0' && value >= 0 && static_cast<size_t>(value) < n_steps &&
                "%" + std::to_string(value) == text) {
                return static_cast<int>(value);
            }
        }
        fail("operand '" + text.substr(0, 32) + "' is not h, w or an earlier step");
    }

    void end() const {
        if (left() != 0) {
            fail("more words than the step takes");
        }
    }

  private:
    std::string              line_;
    size_t                   number_;
    std::vector<std::string> words_;
    size_t                   next_ = 0;
};

Step parse_step(LineReader & line, size_t n_steps) {
    Step step;
    const std::string op = line.word("step");
    if (op == "matmul") {
        step.op     = StepOp::matmul;
        step.tensor = line.name();
        step.x      = line.operand(n_steps);
        if (line.left() > 0) {
            const std::string text = line.word("prec");
            int32_t a = 0;
            int32_t b = 0;
            if (std::sscanf(text.c_str(), "prec=%d,%d", &a, &b) != 2 ||
                "prec=" + std::to_string(a) + "," + std::to_string(b) != text || (a == 0 && b == 0)) {
                line.fail("bad precision '" + text + "'");
            }
            step.prec[0] = a;
            step.prec[1] = b;
        }
    } else if (op == "bias") {
        step.op     = StepOp::bias;
        step.tensor = line.name();
        step.x      = line.operand(n_steps);
    } else if (op == "gather") {
        step.op     = StepOp::gather;
        step.tensor = line.name();
    } else if (op == "cut") {
        step.op     = StepOp::cut;
        step.x      = line.operand(n_steps);
        step.offset = line.integer("offset");
        step.length = line.integer("length");
        if (step.offset < 0 || step.length < 1 || step.offset > (1 << 24) || step.length > (1 << 24)) {
            line.fail("offset or length out of range");
        }
    } else if (op == "glu") {
        step.op   = StepOp::glu;
        step.kind = kind_value(glu_kinds, line.word("kind"));
        if (step.kind < 0) {
            line.fail("unknown gated activation");
        }
        step.x = line.operand(n_steps);
        step.y = line.operand(n_steps);
        if (glu_has_parameters(step.kind)) {
            step.a = line.real("alpha");
            step.b = line.real("limit");
        }
    } else if (op == "unary") {
        step.op   = StepOp::unary;
        step.kind = kind_value(unary_kinds, line.word("kind"));
        if (step.kind < 0) {
            line.fail("unknown activation");
        }
        step.x = line.operand(n_steps);
    } else if (op == "sqr") {
        step.op = StepOp::sqr;
        step.x  = line.operand(n_steps);
    } else if (op == "scale" || op == "clamp") {
        step.op = op == "scale" ? StepOp::scale : StepOp::clamp;
        step.x  = line.operand(n_steps);
        step.a  = line.real("first parameter");
        step.b  = line.real("second parameter");
    } else if (op == "mul" || op == "add") {
        step.op = op == "mul" ? StepOp::mul : StepOp::add;
        step.x  = line.operand(n_steps);
        step.y  = line.operand(n_steps);
    } else {
        line.fail("unknown step '" + op.substr(0, 32) + "'");
    }
    line.end();
    return step;
}

}  // namespace

const char * glu_kind_name(int kind) { return kind_name(glu_kinds, kind); }

const char * unary_kind_name(int kind) { return kind_name(unary_kinds, kind); }

std::string Program::text() const {
    std::string text = "swarm-program 1\n";
    text += input_pair ? "input pair\n" : "input row\n";
    for (size_t i = 0; i < steps.size(); i++) {
        text += "%" + std::to_string(i) + " = " + step_text(steps[i]) + "\n";
    }
    return text + "return " + operand(result) + "\n";
}

uint64_t Program::digest() const {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : text()) {
        hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    }
    return hash;
}

bool Program::uses_weight() const {
    return std::any_of(steps.begin(), steps.end(), [](const Step & s) { return s.x == operand_w || s.y == operand_w; });
}

std::vector<std::string> Program::tensors() const {
    std::vector<std::string> names;
    for (const Step & s : steps) {
        if (!s.tensor.empty() && std::find(names.begin(), names.end(), s.tensor) == names.end()) {
            names.push_back(s.tensor);
        }
    }
    return names;
}

Program Program::parse(const std::string & text) {
    if (text.size() > max_bytes) {
        throw ProgramError("layer program of " + std::to_string(text.size()) + " bytes; at most " +
                           std::to_string(max_bytes) + " are allowed");
    }
    // First of all, so that every message can quote the text.
    for (size_t i = 0, line = 1; i < text.size(); i++) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        if (c != '\n' && (c < 0x20 || c > 0x7e)) {
            throw ProgramError("layer program, line " + std::to_string(line) + ": byte " + std::to_string(c) +
                               " is not printable ASCII");
        }
        line += c == '\n' ? 1 : 0;
    }
    if (text.empty() || text.back() != '\n') {
        throw ProgramError("layer program does not end with a line end");
    }
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) {
        lines.push_back(line);
    }
    if (lines[0] != "swarm-program 1") {
        throw ProgramError("layer program of unknown version: '" + lines[0].substr(0, 64) +
                           "'; this build reads 'swarm-program 1'");
    }
    if (lines.size() < 4 || lines.size() > max_steps + 3) {
        throw ProgramError("layer program of " + std::to_string(lines.size()) + " lines; 4 to " +
                           std::to_string(max_steps + 3) + " are allowed");
    }
    Program program;
    if (lines[1] != "input row" && lines[1] != "input pair") {
        throw ProgramError("layer program, line 2: '" + lines[1].substr(0, 64) +
                           "' is not 'input row' or 'input pair'");
    }
    program.input_pair = lines[1] == "input pair";
    for (size_t i = 2; i + 1 < lines.size(); i++) {
        LineReader line(lines[i], i + 1);
        const size_t n = program.steps.size();
        if (line.word("%N") != "%" + std::to_string(n) || line.word("=") != "=") {
            line.fail("expected '%" + std::to_string(n) + " = ...'");
        }
        program.steps.push_back(parse_step(line, n));
    }
    LineReader last(lines.back(), lines.size());
    if (last.word("return") != "return") {
        last.fail("expected 'return'");
    }
    program.result = last.operand(program.steps.size());
    last.end();
    if (program.result < 0) {
        last.fail("a program returns one of its steps");
    }
    if (program.text() != text) {
        throw ProgramError("layer program is not in its canonical form");
    }
    return program;
}

}  // namespace swarm
