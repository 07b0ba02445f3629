// The expert server's native side: connections over a pair of sockets, the turns at the device, large calls in parts.
// Linked with the build's ggml libraries, as test_store.cpp.

#include "common/check.hpp"
#include "expert_server/store_rig.hpp"

#include "expert_server/call_server.hpp"
#include "expert_server/device_gate.hpp"
#include "router/wire.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

using namespace swarm;

namespace {

using Data = std::vector<uint8_t>;

struct Rig {
    Weights                      weights;
    std::shared_ptr<ExpertStore> store  = std::make_shared<ExpertStore>("CPU", 1);
    std::shared_ptr<CallServer>     server = std::make_shared<CallServer>("CPU", 4, 16, std::chrono::microseconds(300),
                                                                          0.0);
    int                          peer   = -1;
    std::unique_ptr<CallConnection> connection;
    std::thread                  thread;
    std::atomic<int>             n_other{ 0 };
    std::atomic<int>             n_text{ 0 };

    explicit Rig(CallConnection::Timeouts timeouts = {}) {
        store->load(4, Program::parse(program_text), 1, 3, n_expert, weights.tensors);
        publish({ 0, 1, 1, 1, 0, 0 });
        server->set_term("m", 3);
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        peer       = ends[0];
        connection = std::make_unique<CallConnection>(server, ends[1], 4096, timeouts);
        thread     = std::thread([this] {
            connection->serve(
                [this](const uint8_t * data, size_t size, double age_s, const CallConnection::Reply & reply) {
                    CHECK(age_s >= 0);
                    n_other++;
                    n_text += data == nullptr;
                    if (size == 3 && std::memcmp(data, "end", 3) == 0) {
                        throw std::runtime_error("the owner is gone");
                    }
                    reply("other", 5);
                });
        });
    }
    ~Rig() {
        if (connection) {
            connection->stop();
        }
        thread.join();
        ::close(peer);
    }

    void publish(std::vector<uint8_t> ready) {
        server->publish("m", 4,
                        {store, Program::parse(program_text).digest(), n_in, n_out, 3, false, true, std::move(ready)});
    }

    void send(unsigned first_byte, const Data & payload) const {
        Data bytes{uint8_t(first_byte), 0x80 | 126, uint8_t(payload.size() >> 8), uint8_t(payload.size()), 1, 2, 3, 4};
        if (payload.size() < 126) {
            bytes = { uint8_t(first_byte), uint8_t(0x80 | payload.size()), 1, 2, 3, 4 };
        }
        for (size_t i = 0; i < payload.size(); i++) {
            bytes.push_back(uint8_t(payload[i] ^ (1 + i % 4)));
        }
        raw(bytes);
    }
    void raw(const Data & bytes) const {
        CHECK(::send(peer, bytes.data(), bytes.size(), MSG_NOSIGNAL) == ssize_t(bytes.size()));
    }

    bool read(void * to, size_t n) const {
        for (size_t done = 0; done < n;) {
            const ssize_t got = recv(peer, static_cast<uint8_t *>(to) + done, n - done, 0);
            if (got <= 0) {
                return false;
            }
            done += size_t(got);
        }
        return true;
    }
    // The first byte and the payload; 0 at the end of the connection.
    unsigned receive(Data & payload) const {
        uint8_t head[10];
        if (!read(head, 2)) {
            return 0;
        }
        CHECK(!(head[1] & 0x80));
        uint64_t     n        = head[1];
        const size_t n_length = n == 126 ? 2 : n == 127 ? 8 : 0;
        CHECK(read(head + 2, n_length));
        n = n_length ? 0 : n;
        for (size_t i = 0; i < n_length; i++) {
            n = n << 8 | head[2 + i];
        }
        payload.resize(size_t(n));
        CHECK(read(payload.data(), payload.size()));
        return head[0];
    }
    unsigned close_code() const {
        Data payload;
        return receive(payload) == 0x88 && payload.size() >= 2 ? unsigned(payload[0]) << 8 | payload[1] : 0;
    }
};

Data encoded(const Call & call, Dtype dtype = Dtype::f32, uint64_t term = 3, uint64_t deadline_ms = 10000) {
    std::vector<const float *> rows;
    for (int64_t i = 0; i < call.call.n_h; i++) {
        rows.push_back(call.h.data() + i * n_in);
    }
    Request request;
    request.id          = 9;
    request.model       = "m";
    request.program     = call.call.program_digest;
    request.term        = term;
    request.layer       = 4;
    request.reduce      = call.call.reduce;
    request.dtype       = dtype;
    request.n_rows      = uint32_t(call.call.n_rows);
    request.n_h         = uint32_t(rows.size());
    request.n_pairs     = uint32_t(call.row.size());
    request.n_in        = n_in;
    request.h           = rows.data();
    request.row         = call.row.data();
    request.expert      = call.expert.data();
    request.weight      = call.weight.data();
    request.deadline_ms = deadline_ms;
    Data          bytes(request_bytes_bound(request));
    MsgpackWriter writer(bytes.data(), bytes.size());
    std::string   problem;
    CHECK(encode_request(request, writer, problem));
    bytes.resize(writer.size());
    return bytes;
}

bool is_other(const Data & payload) { return std::string(payload.begin(), payload.end()) == "other"; }

}  // namespace

TEST(calls_are_answered_with_the_store_s_bits) {
    Rig rig;
    for (const Reduce reduce : { Reduce::rows, Reduce::sum }) {
        for (const Dtype dtype : { Dtype::f32, Dtype::bf16, Dtype::f16 }) {
            const Call         call(reduce);
            const size_t       n = (reduce == Reduce::rows ? 3 : 2) * size_t(n_out);
            std::vector<float> expected(n);
            rig.store->ffn(call.call, expected.data());
            Data wire(n * dtype_bytes(dtype));
            CHECK(encode_floats(dtype, expected.data(), n, wire.data()));
            for (int i = 0; i < 3; i++) {
                rig.send(0x82, encoded(call, dtype));
                Data        payload;
                Reply       reply;
                std::string problem;
                CHECK(rig.receive(payload) == 0x82);
                CHECK(decode_reply(payload.data(), payload.size(), reply, problem));
                CHECK(reply.id == 9 && reply.y.size == wire.size() &&
                      std::memcmp(reply.y.data, wire.data(), wire.size()) == 0);
            }
        }
    }
    const CallCounters counters = rig.server->counters();
    CHECK(counters.calls == 18 && counters.pairs == 54 && counters.bytes_sent > 0 && counters.bytes_received > 0);
    CHECK(rig.n_other == 0);
}

TEST(every_other_message_goes_to_the_owner) {
    Rig        rig;
    const auto goes = [&](const Data & message) {
        const int before = rig.n_other;
        rig.send(0x82, message);
        Data payload;
        CHECK(rig.receive(payload) == 0x82 && is_other(payload) && rig.n_other == before + 1);
    };
    const auto changed = [](auto change) {
        Call call;
        change(call);
        call.call.n_pairs = int64_t(call.row.size());
        return encoded(call);
    };
    goes({});
    goes({ 1, 2, 3 });
    goes(encoded(Call(), Dtype::f32, 2));
    goes(encoded(Call(), Dtype::f32, 4));
    goes(encoded(Call(), Dtype::f32, 3, 0));
    goes(changed([](Call & c) { c.expert[0] = 0; }));             // not ready
    goes(changed([](Call & c) { c.expert[0] = -1; }));
    goes(changed([](Call & c) { c.expert[0] = n_expert; }));
    goes(changed([](Call & c) { c.expert[1] = 3; }));             // twice in a row
    goes(changed([](Call & c) { c.row[2] = 2; }));
    goes(changed([](Call & c) { c.row[0] = 1; }));                // descends
    goes(changed([](Call & c) { c.call.n_rows = 0; }));
    goes(changed([](Call & c) { c.call.n_rows = 5; }));           // above the server's limit
    goes(changed([](Call & c) { c.h[3] = std::numeric_limits<float>::infinity(); }));
    goes(changed([](Call & c) { c.weight[0] = std::numeric_limits<float>::quiet_NaN(); }));
    Call heavy;
    heavy.weight = { 1e9f, 1e9f, 1e9f };
    goes(encoded(heavy, Dtype::f16));  // the result does not fit
    goes(changed([](Call & c) { c.call.program_digest++; }));
    goes(changed([](Call & c) { c.call.n_h = 1; }));
    goes(changed([](Call & c) { c.row.pop_back(), c.row.pop_back(), c.row.pop_back(); }));
    const Call large;
    Data       cut = encoded(large);
    cut.pop_back();
    goes(cut);
    rig.send(0x81, { 't' });
    Data payload;
    CHECK(rig.receive(payload) == 0x82 && is_other(payload) && rig.n_text == 1);
    rig.publish({ 0, 0, 0, 0, 0, 0 });
    goes(encoded(large));
    rig.server->withdraw("m", 4);
    rig.server->withdraw("other", 4);
    goes(encoded(large));
    rig.publish({ 0, 1, 1, 1, 0, 0 });
    rig.store->drop(4, 1, 3);  // while it still counts as ready
    goes(encoded(large));
    CHECK(rig.server->counters().calls == 0);
}

TEST(mutated_messages_are_answered) {
    Rig          rig;
    std::mt19937 random(17);
    const Data   good = encoded(Call());
    int          n_right = 0;
    for (int i = 0; i < 5000; i++) {
        Data bytes = good;
        for (unsigned n = 1 + random() % 2; n > 0; n--) {
            bytes[random() % bytes.size()] = uint8_t(random());
        }
        rig.send(0x82, bytes);
        Data payload;
        CHECK(rig.receive(payload) == 0x82);
        n_right += !is_other(payload);
    }
    CHECK(n_right > 100 && rig.n_other > 100);
}

TEST(control_frames_and_ends) {
    Data payload;
    {
        Rig rig;
        rig.send(0x89, { 'h', 'i' });
        CHECK(rig.receive(payload) == 0x8a && payload == (Data{ 'h', 'i' }));
        // In two frames, with a ping in between and all of it in bytes.
        const Data message = encoded(Call());
        rig.send(0x02, Data(message.begin(), message.begin() + 100));
        rig.send(0x89, {});
        rig.send(0x80, Data(message.begin() + 100, message.end()));
        CHECK(rig.receive(payload) == 0x8a && rig.receive(payload) == 0x82 && !is_other(payload));
        rig.send(0x88, { 3, 0xe8 });
        CHECK(rig.close_code() == 1000 && rig.receive(payload) == 0);
    }
    {
        Rig rig;
        rig.raw({ 0x82, 0xff, 0, 0, 0, 0, 0, 0, 0x10, 0x01 });
        CHECK(rig.close_code() == 1009 && rig.receive(payload) == 0);
    }
    {
        Rig rig;
        rig.raw({ 0x82, 1, 0 });
        CHECK(rig.close_code() == 1002 && rig.receive(payload) == 0);
    }
    {
        Rig rig;
        rig.connection->renew();
        CHECK(rig.close_code() == 1012 && rig.receive(payload) == 0);
    }
    {
        Rig rig;
        shutdown(rig.peer, SHUT_WR);
        CHECK(rig.receive(payload) == 0);
    }
    {
        CallConnection::Timeouts soon;
        soon.silence_s = 0.05;
        Rig rig(soon);
        rig.raw({ 0x82 });
        CHECK(rig.receive(payload) == 0);
    }
    {
        // A peer that takes nothing: its answers fill the socket, and the connection ends.
        CallConnection::Timeouts soon;
        soon.silence_s = 0.05;
        Rig        rig(soon);
        const Data ping(125);
        Data       many;
        for (int i = 0; i < 100; i++) {
            many.insert(many.end(), { 0x89, 0x80 | 125, 0, 0, 0, 0 });
            many.insert(many.end(), ping.begin(), ping.end());
        }
        while (::send(rig.peer, many.data(), many.size(), MSG_NOSIGNAL) > 0) {
        }
    }
}

TEST(an_owner_that_fails_ends_the_connection) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CallConnection connection(std::make_shared<CallServer>("CPU", 4, 16, std::chrono::microseconds(300), 0.0), ends[1],
                              4096, {});
    const Data     frame{ 0x82, 0x81, 0, 0, 0, 0, 'x' };
    CHECK(::send(ends[0], frame.data(), frame.size(), 0) == ssize_t(frame.size()));
    CHECK_CONTAINS(error_of<std::runtime_error>([&] {
                       connection.serve([](const uint8_t *, size_t, double, const CallConnection::Reply &) {
                           throw std::runtime_error("gone");
                       });
                   }),
                   "gone");
    char byte;
    CHECK(recv(ends[0], &byte, 1, 0) == 0);
    ::close(ends[0]);
}

TEST(small_calls_pass_parts_of_large_ones_but_not_for_ever) {
    DeviceGate       gate;
    std::mutex       mutex;
    std::string      order;
    std::vector<std::thread> threads;
    gate.enter(DeviceGate::Size::small);
    size_t     n_waiting = 0;
    const auto comes     = [&](DeviceGate::Size size, char name) {
        threads.emplace_back([&gate, &mutex, &order, size, name] {
            const DeviceGate::Turn            turn(gate, size);
            const std::lock_guard<std::mutex> lock(mutex);
            order += name;
        });
        n_waiting++;
        while (gate.waiting() < n_waiting) {
            std::this_thread::yield();
        }
    };
    comes(DeviceGate::Size::part_of_large, 'L');
    comes(DeviceGate::Size::part_of_large, 'M');
    for (int i = 0; i < DeviceGate::passed_max + 4; i++) {
        comes(DeviceGate::Size::small, char('a' + i));
    }
    gate.leave();
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(order == "abcdefghijklmnopLqrstM");
    CHECK(gate.waiting() == 0);
}

TEST(a_late_call_or_one_too_many_does_not_compute) {
    Rig        rig;
    const auto gate = DeviceGate::of("CPU");
    CHECK(gate == DeviceGate::of("CPU") && gate != DeviceGate::of("another"));
    Call               call;
    std::vector<float> y(3 * n_out, -7.0f);
    FfnTiming          timing;
    timing.arrived  = FfnTiming::Clock::now();
    timing.deadline = timing.arrived - std::chrono::seconds(1);
    CHECK_CONTAINS(error_of<TooLate>([&] { rig.store->ffn(call.call, y.data(), &timing); }), "deadline");
    timing             = {};
    timing.waiting_max = 0;
    CHECK_CONTAINS(error_of<TooLate>([&] { rig.store->ffn(call.call, y.data(), &timing); }), "waiting");
    CHECK(y[0] == -7.0f);
    timing         = {};
    timing.arrived = FfnTiming::Clock::now() - std::chrono::milliseconds(50);
    rig.store->ffn(call.call, y.data(), &timing);
    CHECK(timing.queue_us >= 50000 && y[0] != -7.0f);
}

TEST(a_small_call_allocates_nothing) {
    Rig                rig;
    const Call         rows, sum(Reduce::sum);
    std::vector<float> y(3 * n_out), total(2 * n_out);
    for (int i = 0; i < 2; i++) {
        rig.store->ffn(rows.call, y.data());
        rig.store->ffn(sum.call, total.data());
    }
    const long before = n_allocations_of_thread();
    rig.store->ffn(rows.call, y.data());
    rig.store->ffn(sum.call, total.data());
    CHECK(n_allocations_of_thread() == before);
    CHECK(rig.store->kept_graphs() == 1);
}

TEST(kept_graphs_are_of_their_slice_and_bounded) {
    const Weights      weights;
    ExpertStore        store("CPU", 1);
    const Program      program = Program::parse(program_text);
    std::vector<float> first(3 * n_out), again(3 * n_out), other(3 * n_out);
    const Call         call;
    store.load(4, program, 1, 3, n_expert, weights.tensors);
    store.ffn(call.call, first.data());
    // Another file in its place: nothing of the former slice may be left.
    store.drop(4, 1, 3);
    auto shifted = weights.tensors;
    for (auto & [name, tensor] : shifted) {
        tensor.parts[0].offset += tensor.parts[0].bytes / 3;
    }
    store.load(4, program, 1, 3, n_expert, shifted);
    store.ffn(call.call, other.data());
    store.drop(4, 1, 3);
    store.load(4, program, 1, 3, n_expert, weights.tensors);
    store.ffn(call.call, again.data());
    CHECK(first == again && first != other);
    // More shapes than are kept: layers × numbers of pairs.
    for (int layer = 10; layer < 90; layer++) {
        store.load(layer, program, 1, 3, n_expert, weights.tensors);
    }
    std::vector<float>   h(64 * n_in, 0.25f), y(64 * n_out), weight(64, 1.0f);
    std::vector<int32_t> row(64), expert(64, 2);
    size_t               most = 0;
    for (int n = 1; n <= 64; n += 3) {
        for (int layer = 10; layer < 90; layer++) {
            FfnCall one;
            one.layer          = layer;
            one.program_digest = program.digest();
            one.h              = h.data();
            one.n_h            = one.n_rows = one.n_pairs = n;
            one.n_in           = n_in;
            for (int i = 0; i < n; i++) {
                row[size_t(i)] = i;
            }
            one.row    = row.data();
            one.expert = expert.data();
            one.weight = weight.data();
            store.ffn(one, y.data());
        }
        most = std::max(most, store.kept_graphs());
    }
    CHECK(most > 100 && most < 80 * 22);
    store.ffn(call.call, again.data());
    CHECK(first == again);
}

TEST(calls_from_many_threads_give_the_same_bits) {
    Rig                rig;
    const Call         call;
    std::vector<float> expected(3 * n_out);
    rig.store->ffn(call.call, expected.data());
    rig.store->set_part_products_max(1);
    std::vector<std::thread> threads;
    std::atomic<int>         n_wrong{ 0 };
    for (int t = 0; t < 4; t++) {
        threads.emplace_back([&] {
            std::vector<float> y(3 * n_out);
            for (int i = 0; i < 200; i++) {
                rig.store->ffn(call.call, y.data());
                n_wrong += y != expected;
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(n_wrong == 0);
}
