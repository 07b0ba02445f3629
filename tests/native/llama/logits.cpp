// swarm-logits: evaluates a prompt and greedy tokens with libllama and writes the logits.
//
// The oracle of the tests: the same program, run with stock buffers and with the experts in the Swarm
// buffer type, must write the same bytes.
//
//   swarm-logits -m MODEL -o OUT [options]
//   swarm-logits --jobs FILE      one job per line, its arguments separated by tabs
//
// Each job prints one line on stdout when it ends, "ok OUT" or "failed OUT: REASON", and the reason on stderr
// too; the exit status is 0 only when all jobs are ok. An output file appears whole or not at all.
//
// Output, little-endian: "SWLG", then uint32 version (1), kind (0 logits, 1 embeddings), width, n_rows,
// n_prompt, n_generated; then float32 [n_rows][width]; then int32 [n_prompt + n_generated] token ids.
// Rows: the prompt's (all with --all-logits, else the last), then one for each generated token.
//
// Models that keep no memory (diffusion) are evaluated as a whole for every token. Models that give
// embeddings instead of logits (encoders) are evaluated once, one row per prompt token.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr uint32_t FORMAT_VERSION = 1;

const char * const USAGE =
    "usage: swarm-logits -m MODEL -o OUT [options]\n"
    "       swarm-logits --jobs FILE    one job per line, arguments separated by tabs\n"
    "  -ot PATTERN=BUFT[,PATTERN=BUFT...]  buffer type of the tensors that match; repeatable\n"
    "  --no-repack            no repacked weight formats (use_extra_bufts off)\n"
    "  --load-mode MODE       auto, none, mmap, mlock, mmap+mlock or dio, as llama.cpp names them\n"
    "  --tokens-file FILE     prompt: token ids separated by white space\n"
    "  --n-prompt N --seed S  prompt: N random tokens (40, 1)\n"
    "  -n N                   greedy tokens after the prompt (64)\n"
    "  -t N                   threads (2)\n"
    "  --ubatch N             physical batch (512)\n"
    "  -ngl N                 layers on a GPU (0)\n"
    "  --all-logits           a row for each prompt token instead of the last one\n"
    "  -v                     llama.cpp's log on stderr\n";

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Job {
    std::string model;
    std::string out;
    std::string tokens_file;
    std::string load_mode = "auto";
    std::vector<std::pair<std::string, std::string>> overrides;  // pattern, name of the buffer type
    uint32_t n_prompt = 40;
    uint32_t seed = 1;
    uint32_t n_generate = 64;
    uint32_t n_ubatch = 512;
    int n_threads = 2;
    int n_gpu_layers = 0;
    bool repack = true;
    bool all_logits = false;
};

struct Result {
    uint32_t kind = 0;
    uint32_t width = 0;
    uint32_t n_prompt = 0;
    std::vector<float> rows;
    std::vector<llama_token> tokens;
};

bool verbose = false;

void log_callback(ggml_log_level level, const char * text, void * /*user_data*/) {
    static bool shown = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        shown = verbose || level == GGML_LOG_LEVEL_ERROR;
    }
    if (shown) {
        std::fputs(text, stderr);
    }
}

uint32_t parse_uint(const std::string & option, const std::string & text) {
    try {
        size_t used = 0;
        const unsigned long value = std::stoul(text, &used);
        if (used == text.size() && text[0] != '-' && value <= 0x7fffffffUL) {
            return static_cast<uint32_t>(value);
        }
    } catch (const std::logic_error &) {
    }
    throw Failure(option + ": '" + text + "' is not a number");
}

Job parse_job(const std::vector<std::string> & args) {
    Job job;
    for (size_t i = 0; i < args.size(); i++) {
        const std::string & option = args[i];
        const auto value = [&]() -> const std::string & {
            if (i + 1 >= args.size()) {
                throw Failure(option + " wants a value");
            }
            return args[++i];
        };
        if (option == "-m") {
            job.model = value();
        } else if (option == "-o") {
            job.out = value();
        } else if (option == "-ot") {
            std::stringstream list(value());
            for (std::string item; std::getline(list, item, ',');) {
                const size_t split = item.find('=');
                if (split == std::string::npos) {
                    throw Failure("-ot: '" + item + "' is not PATTERN=BUFT");
                }
                job.overrides.emplace_back(item.substr(0, split), item.substr(split + 1));
            }
        } else if (option == "--no-repack") {
            job.repack = false;
        } else if (option == "--load-mode") {
            job.load_mode = value();
        } else if (option == "--tokens-file") {
            job.tokens_file = value();
        } else if (option == "--n-prompt") {
            job.n_prompt = parse_uint(option, value());
        } else if (option == "--seed") {
            job.seed = parse_uint(option, value());
        } else if (option == "-n") {
            job.n_generate = parse_uint(option, value());
        } else if (option == "-t") {
            job.n_threads = static_cast<int>(parse_uint(option, value()));
        } else if (option == "--ubatch") {
            job.n_ubatch = parse_uint(option, value());
        } else if (option == "-ngl") {
            job.n_gpu_layers = static_cast<int>(parse_uint(option, value()));
        } else if (option == "--all-logits") {
            job.all_logits = true;
        } else if (option == "-v") {
            verbose = true;
        } else {
            throw Failure("unknown option '" + option + "'\n" + USAGE);
        }
    }
    if (job.model.empty() || job.out.empty()) {
        throw Failure(std::string("-m and -o are needed\n") + USAGE);
    }
    if (job.n_threads < 1 || job.n_ubatch < 1) {
        throw Failure("-t and --ubatch must be at least 1");
    }
    return job;
}

ggml_backend_buffer_type_t find_buffer_type(const std::string & name) {
    std::string known;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(ggml_backend_dev_get(i));
        if (type == nullptr) {
            continue;
        }
        if (name == ggml_backend_buft_name(type)) {
            return type;
        }
        known += std::string(" ") + ggml_backend_buft_name(type);
    }
    throw Failure("-ot: no device has the buffer type '" + name + "'; there are:" + known);
}

// A thread pool that sleeps instead of polling while it waits: the experts' processes need the cores.
// Kept for the process, one per thread count.
ggml_threadpool_t thread_pool(int n_threads) {
    static std::map<int, ggml_threadpool_t> pools;
    ggml_threadpool_t & pool = pools[n_threads];
    if (pool == nullptr) {
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        if (cpu == nullptr) {
            throw Failure("this build has no CPU backend");
        }
        void * address = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_threadpool_new");
        if (address == nullptr) {
            throw Failure("the CPU backend has no ggml_threadpool_new");
        }
        const auto create = reinterpret_cast<decltype(ggml_threadpool_new) *>(address);
        ggml_threadpool_params params;
        ggml_threadpool_params_init(&params, n_threads);
        params.poll = 0;
        pool = create(&params);
        if (pool == nullptr) {
            throw Failure("could not create a thread pool of " + std::to_string(n_threads) + " threads");
        }
    }
    return pool;
}

std::vector<llama_token> read_tokens(const std::string & path, int32_t n_vocab) {
    std::ifstream file(path);
    if (!file) {
        throw Failure("could not read " + path);
    }
    std::vector<llama_token> tokens;
    for (int64_t id = 0; file >> id;) {
        if (id < 0 || id >= n_vocab) {
            throw Failure(path + ": token " + std::to_string(id) + " is outside the vocabulary of " +
                          std::to_string(n_vocab));
        }
        tokens.push_back(static_cast<llama_token>(id));
    }
    if (!file.eof()) {
        throw Failure(path + " holds something that is not a token id");
    }
    return tokens;
}

// The modulo of a raw generator value, because the standard's distributions differ between libraries.
std::vector<llama_token> random_tokens(uint32_t count, uint32_t seed, int32_t n_vocab) {
    std::mt19937 generator(seed);
    std::vector<llama_token> tokens(count);
    for (llama_token & token : tokens) {
        token = static_cast<llama_token>(generator() % static_cast<uint32_t>(n_vocab));
    }
    return tokens;
}

class Evaluation {
public:
    explicit Evaluation(const Job & job) : job_(job) {
        load();
        vocab_size_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
        if (vocab_size_ < 1) {
            throw Failure("the model has no vocabulary");
        }
        prompt_ = job.tokens_file.empty() ? random_tokens(job.n_prompt, job.seed, vocab_size_)
                                          : read_tokens(job.tokens_file, vocab_size_);
        if (prompt_.empty()) {
            throw Failure("the prompt is empty");
        }
        create_context(job.n_ubatch);
        const bool whole = llama_get_memory(context_.get()) == nullptr || !llama_get_causal_attn(context_.get()) ||
                           llama_model_has_encoder(model_.get());
        if (whole && job.n_ubatch < total()) {
            create_context(total());  // without causal attention a batch cannot be cut
        }
    }

    Result run() {
        result_.n_prompt = static_cast<uint32_t>(prompt_.size());
        result_.tokens = prompt_;
        const llama_model * model = model_.get();
        if (llama_model_has_encoder(model)) {
            evaluate(LLAMA_PROCESS_TYPE_ENCODE, prompt_, 0, true);
        }
        if (llama_model_has_encoder(model) && llama_model_has_decoder(model)) {
            llama_token start = llama_model_decoder_start_token(model);
            if (start == LLAMA_TOKEN_NULL) {
                start = llama_vocab_bos(llama_model_get_vocab(model));
            }
            if (start == LLAMA_TOKEN_NULL) {
                start = 0;
            }
            result_.width = static_cast<uint32_t>(vocab_size_);
            evaluate(LLAMA_PROCESS_TYPE_DECODE, {start}, 0, false);
            take_logits(0, 1);
            generate(1);
        } else if (llama_model_has_encoder(model) || gives_embeddings()) {
            embed();
        } else {
            result_.width = static_cast<uint32_t>(vocab_size_);
            if (llama_get_memory(context_.get()) == nullptr) {
                generate_whole();
            } else {
                evaluate(LLAMA_PROCESS_TYPE_DECODE, prompt_, 0, job_.all_logits);
                take_prompt_logits(prompt_.size());
                generate(static_cast<llama_pos>(prompt_.size()));
            }
        }
        return std::move(result_);
    }

private:
    struct FreeModel {
        void operator()(llama_model * model) const { llama_model_free(model); }
    };
    struct FreeContext {
        void operator()(llama_context * context) const { llama_free(context); }
    };

    uint32_t total() const { return static_cast<uint32_t>(prompt_.size()) + job_.n_generate + 1; }

    // Encoders such as BERT: attention in both directions, and no language head.
    bool gives_embeddings() const {
        return !llama_get_causal_attn(context_.get()) && !llama_model_is_diffusion(model_.get());
    }

    void load() {
        std::vector<llama_model_tensor_buft_override> overrides;
        for (const auto & item : job_.overrides) {
            overrides.push_back({item.first.c_str(), find_buffer_type(item.second)});
        }
        overrides.push_back({nullptr, nullptr});
        llama_model_params params = llama_model_default_params();
        params.tensor_buft_overrides = overrides.data();
        params.use_extra_bufts = job_.repack;
        params.n_gpu_layers = job_.n_gpu_layers;
        if (job_.load_mode != "auto") {
            params.load_mode = llama_load_mode_from_str(job_.load_mode.c_str());
        }
        params.progress_callback = [](float, void *) { return true; };
        model_.reset(llama_model_load_from_file(job_.model.c_str(), params));
        if (model_ == nullptr) {
            throw Failure("the model could not be loaded");
        }
    }

    void create_context(uint32_t n_ubatch) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = total();
        params.n_batch = std::max(total(), n_ubatch);
        params.n_ubatch = n_ubatch;
        params.n_seq_max = 1;
        params.n_threads = job_.n_threads;
        params.n_threads_batch = job_.n_threads;
        context_.reset(llama_init_from_model(model_.get(), params));
        if (context_ == nullptr) {
            throw Failure("the context could not be created");
        }
        ggml_threadpool_t pool = thread_pool(job_.n_threads);
        llama_attach_threadpool(context_.get(), pool, pool);
    }

    void evaluate(llama_process_type type, const std::vector<llama_token> & tokens, llama_pos first, bool all) {
        const auto count = static_cast<int32_t>(tokens.size());
        llama_batch batch = llama_batch_init(count, 0, 1);
        batch.n_tokens = count;
        for (int32_t i = 0; i < count; i++) {
            batch.token[i] = tokens[static_cast<size_t>(i)];
            batch.pos[i] = first + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = all || i + 1 == count;
        }
        const bool encode = type == LLAMA_PROCESS_TYPE_ENCODE;
        const int32_t status = encode ? llama_encode(context_.get(), batch) : llama_decode(context_.get(), batch);
        llama_batch_free(batch);
        if (status != 0) {
            throw Failure(std::string(encode ? "encoding " : "decoding ") + std::to_string(count) +
                          " tokens at position " + std::to_string(first) + " failed with status " +
                          std::to_string(status));
        }
    }

    void append(const float * row, int32_t index) {
        if (row == nullptr) {
            throw Failure("llama.cpp gave no output for batch index " + std::to_string(index));
        }
        for (uint32_t i = 0; i < result_.width; i++) {
            if (std::isnan(row[i])) {
                throw Failure("output row " + std::to_string(result_.rows.size() / result_.width) + " holds NaN");
            }
        }
        result_.rows.insert(result_.rows.end(), row, row + result_.width);
    }

    void take_logits(size_t first, size_t last) {
        for (size_t i = first; i < last; i++) {
            const auto index = static_cast<int32_t>(i);
            append(llama_get_logits_ith(context_.get(), index), index);
        }
    }

    void take_prompt_logits(size_t count) { take_logits(job_.all_logits ? 0 : count - 1, count); }

    llama_token greedy() const {
        const auto begin = result_.rows.end() - static_cast<std::ptrdiff_t>(result_.width);
        return static_cast<llama_token>(std::max_element(begin, result_.rows.end()) - begin);
    }

    void generate(llama_pos position) {
        for (uint32_t i = 0; i < job_.n_generate; i++) {
            result_.tokens.push_back(greedy());
            evaluate(LLAMA_PROCESS_TYPE_DECODE, {result_.tokens.back()}, position++, true);
            take_logits(0, 1);
        }
    }

    void generate_whole() {
        llama_set_causal_attn(context_.get(), false);
        evaluate(LLAMA_PROCESS_TYPE_DECODE, result_.tokens, 0, true);
        take_prompt_logits(result_.tokens.size());
        for (uint32_t i = 0; i < job_.n_generate; i++) {
            result_.tokens.push_back(greedy());
            evaluate(LLAMA_PROCESS_TYPE_DECODE, result_.tokens, 0, true);
            take_logits(result_.tokens.size() - 1, result_.tokens.size());
        }
    }

    void embed() {
        llama_set_embeddings(context_.get(), true);
        const bool encode = llama_model_has_encoder(model_.get()) || llama_get_memory(context_.get()) == nullptr;
        evaluate(encode ? LLAMA_PROCESS_TYPE_ENCODE : LLAMA_PROCESS_TYPE_DECODE, prompt_, 0, true);
        result_.kind = 1;
        result_.width = static_cast<uint32_t>(llama_model_n_embd_out(model_.get()));
        const float * pooled = llama_get_embeddings_seq(context_.get(), 0);
        if (pooled != nullptr) {
            append(pooled, 0);
            return;
        }
        for (size_t i = 0; i < prompt_.size(); i++) {
            const auto index = static_cast<int32_t>(i);
            append(llama_get_embeddings_ith(context_.get(), index), index);
        }
    }

    const Job & job_;
    std::unique_ptr<llama_model, FreeModel> model_;
    std::unique_ptr<llama_context, FreeContext> context_;
    int32_t vocab_size_ = 0;
    std::vector<llama_token> prompt_;
    Result result_;
};

void write_result(const Result & result, const std::string & path) {
    const std::string unfinished = path + ".part";
    std::FILE * file = std::fopen(unfinished.c_str(), "wb");
    if (file == nullptr) {
        throw Failure("could not create " + unfinished + ": " + std::strerror(errno));
    }
    const uint32_t header[] = {FORMAT_VERSION,
                               result.kind,
                               result.width,
                               static_cast<uint32_t>(result.rows.size() / result.width),
                               result.n_prompt,
                               static_cast<uint32_t>(result.tokens.size()) - result.n_prompt};
    bool ok = std::fwrite("SWLG", 1, 4, file) == 4;
    ok = ok && std::fwrite(header, sizeof(header), 1, file) == 1;
    ok = ok && std::fwrite(result.rows.data(), sizeof(float), result.rows.size(), file) == result.rows.size();
    ok = ok &&
         std::fwrite(result.tokens.data(), sizeof(llama_token), result.tokens.size(), file) == result.tokens.size();
    ok = std::fclose(file) == 0 && ok;
    if (!ok || std::rename(unfinished.c_str(), path.c_str()) != 0) {
        const std::string reason = std::strerror(errno);
        std::remove(unfinished.c_str());
        throw Failure("could not write " + path + ": " + reason);
    }
}

bool run_job(const std::vector<std::string> & args) {
    Job job;
    std::string reason;
    try {
        job = parse_job(args);
        write_result(Evaluation(job).run(), job.out);
        std::printf("ok %s\n", job.out.c_str());
    } catch (const std::exception & error) {
        reason = error.what();
        std::fprintf(stderr, "swarm-logits: %s%s%s\n", job.model.c_str(), job.model.empty() ? "" : ": ",
                     reason.c_str());
        std::replace(reason.begin(), reason.end(), '\n', ' ');
        std::printf("failed %s: %s\n", job.out.c_str(), reason.c_str());
    }
    std::fflush(stdout);
    return reason.empty();
}

bool run_jobs(const std::string & path) {
    std::ifstream file(path);
    if (!file) {
        std::fprintf(stderr, "swarm-logits: could not read %s\n", path.c_str());
        return false;
    }
    bool all_ok = true;
    for (std::string line; std::getline(file, line);) {
        if (line.empty()) {
            continue;
        }
        std::vector<std::string> args;
        std::stringstream fields(line);
        for (std::string field; std::getline(fields, field, '\t');) {
            args.push_back(field);
        }
        all_ok = run_job(args) && all_ok;
    }
    return all_ok;
}

}  // namespace

int main(int argc, char ** argv) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    if (args.empty() || args[0] == "-h" || args[0] == "--help") {
        std::fputs(USAGE, args.empty() ? stderr : stdout);
        return args.empty() ? 2 : 0;
    }
    llama_log_set(log_callback, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    const bool ok = args.size() == 2 && args[0] == "--jobs" ? run_jobs(args[1]) : run_job(args);
    llama_backend_free();
    return ok ? 0 : 1;
}
