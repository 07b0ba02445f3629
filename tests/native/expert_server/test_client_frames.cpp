// What a WebSocket client sends, and the server's side of the call's messages: right ones, wrong ones, random ones.

#include "common/check.hpp"

#include "expert_server/client_frames.hpp"
#include "router/wire.hpp"
#include "expert_server/wire.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

using namespace swarm;

namespace {

using Kind = ClientFrames::Kind;
using Data = std::vector<uint8_t>;

constexpr size_t limit = 300000;

Data frame(unsigned first_byte, const std::string & payload, uint32_t mask = 0x9a0b33c7u) {
    Data         bytes{ uint8_t(first_byte) };
    const size_t n = payload.size();
    if (n < 126) {
        bytes.push_back(uint8_t(0x80 | n));
    } else {
        const int n_length = n <= 0xffff ? 2 : 8;
        bytes.push_back(n_length == 2 ? 0x80 | 126 : 0x80 | 127);
        for (int i = n_length - 1; i >= 0; i--) {
            bytes.push_back(uint8_t(uint64_t(n) >> (8 * i)));
        }
    }
    for (int i = 0; i < 4; i++) {
        bytes.push_back(uint8_t(mask >> (8 * i)));
    }
    for (size_t i = 0; i < n; i++) {
        bytes.push_back(uint8_t(uint8_t(payload[i]) ^ uint8_t(mask >> (8 * (i % 4)))));
    }
    return bytes;
}

Data operator+(Data a, const Data & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

void give(ClientFrames & frames, const uint8_t * data, size_t size) {
    while (size > 0) {
        size_t          room;
        uint8_t * const at = frames.space(room);
        const size_t    n  = std::min(room, size);
        std::copy(data, data + n, at);
        frames.received(n);
        data += n;
        size -= n;
        if (size > 0 && frames.next() != Kind::incomplete) {
            return;
        }
    }
}

std::string text(Bytes bytes) { return { reinterpret_cast<const char *>(bytes.data), bytes.size }; }

// All that comes of these bytes, in pieces of at most `piece`, as KIND:payload.
std::vector<std::string> read_all(const Data & bytes, size_t piece, std::mt19937 * random = nullptr) {
    ClientFrames             frames(limit);
    std::vector<std::string> seen;
    for (size_t at = 0; at <= bytes.size();) {
        for (;;) {
            const Kind kind = frames.next();
            if (kind == Kind::incomplete) {
                break;
            }
            seen.push_back(std::to_string(int(kind)) + ":" +
                           (kind == Kind::violation ? std::to_string(frames.close_code()) : text(frames.payload())));
            if (kind == Kind::violation || kind == Kind::close) {
                return seen;
            }
            if (random && (*random)() % 4 == 0) {
                frames.shrink();
            }
        }
        if (at == bytes.size()) {
            break;
        }
        size_t          room;
        uint8_t * const to = frames.space(room);
        size_t          n  = std::min({ room, bytes.size() - at, random ? 1 + (*random)() % piece : piece });
        std::copy(bytes.data() + at, bytes.data() + at + n, to);
        frames.received(n);
        at += n;
    }
    return seen;
}

std::string code_of(const Data & bytes) {
    const auto seen = read_all(bytes, bytes.size() + 1);
    return seen.empty() ? "nothing" : seen.back();
}

struct Call {
    std::vector<float>   h{ 0.5f, -1, 2, 0.25f, 1.5f, 0, -0.125f, 3 };
    const float *        rows[2] = { h.data(), h.data() + 4 };
    std::vector<int32_t> row{ 0, 0, 1 }, expert{ 2, 5, 0 };
    std::vector<float>   weight{ 0.25f, 0.75f, 1 };

    Data encoded(Dtype dtype = Dtype::f32, Reduce reduce = Reduce::sum) {
        Request request;
        request.id          = 0xffffffffffffffffu;
        request.model       = "demo-0123";
        request.program     = 0x1122334455667788u;
        request.term        = 3;
        request.layer       = 5;
        request.reduce      = reduce;
        request.dtype       = dtype;
        request.n_rows      = request.n_h = 2;
        request.n_pairs     = 3;
        request.n_in        = 4;
        request.h           = rows;
        request.row         = row.data();
        request.expert      = expert.data();
        request.weight      = weight.data();
        request.deadline_ms = 2000;
        Data          bytes(request_bytes_bound(request));
        MsgpackWriter writer(bytes.data(), bytes.size());
        std::string   problem;
        CHECK(encode_request(request, writer, problem));
        bytes.resize(writer.size());
        return bytes;
    }
};

}  // namespace

TEST(frames_in_any_pieces) {
    std::mt19937 random(3);
    std::string  large(200000, 'x');
    for (char & c : large) {
        c = char(random());
    }
    const Data bytes = frame(0x82, "one") + frame(0x02, "tw") + frame(0x89, "ping") + frame(0x00, "") +
                       frame(0x80, "o") + frame(0x82, "") + frame(0x8a, "pong") + frame(0x82, large) +
                       frame(0x81, "text") + frame(0x82, std::string(126, 'y')) + frame(0x02, large.substr(0, 150000)) +
                       frame(0x80, large.substr(0, 150000)) + frame(0x88, std::string("\x03\xe8", 2) + "bye") +
                       frame(0x82, "never");
    const auto whole = read_all(bytes, bytes.size() + 1);
    CHECK(whole.size() == 9);
    CHECK(whole[0] == "1:one" && whole[1] == "3:ping" && whole[2] == "1:two" && whole[3] == "1:");
    CHECK(whole[4] == "1:" + large && whole[5] == "2:text" && whole[7].size() == 300002);
    CHECK(whole[8] == std::string("4:\x03\xe8") + "bye");
    CHECK(read_all(bytes, 1) == whole);
    for (int i = 0; i < 30; i++) {
        CHECK(read_all(bytes, i % 2 ? 9 : 100000, &random) == whole);
    }
}

TEST(frames_that_break_the_rules) {
    CHECK(code_of(frame(0xc2, "reserved bit")) == "5:1002");
    CHECK(code_of(Data{ 0x82, 3, 1, 2, 3 }) == "5:1002");  // not masked
    CHECK(code_of(frame(0x80, "continues nothing")) == "5:1002");
    CHECK(code_of(frame(0x02, "begun") + frame(0x82, "and begun again")) == "5:1002");
    CHECK(code_of(frame(0x83, "no such kind")) == "5:1002");
    CHECK(code_of(frame(0x8b, "no such kind")) == "5:1002");
    CHECK(code_of(frame(0x09, "in pieces")) == "5:1002");
    CHECK(code_of(frame(0x89, std::string(126, 'z'))) == "5:1002");
    CHECK(code_of(frame(0x88, "x")) == "5:1002");
    CHECK(code_of(frame(0x88, std::string("\0\1", 2))) == "5:1002");
    CHECK(code_of(frame(0x88, "")) == "4:");
    // Announced is enough, whatever the sum would wrap to.
    for (const uint64_t n : { uint64_t(limit) + 1, uint64_t(1) << 63, ~uint64_t(0) }) {
        Data header{ 0x82, 0xff };
        for (int i = 7; i >= 0; i--) {
            header.push_back(uint8_t(n >> (8 * i)));
        }
        CHECK(code_of(header) == "5:1009");
        header[0] = 0x80;
        CHECK(code_of(frame(0x02, "begun") + header) == "5:1009");
    }
    CHECK(code_of(frame(0x02, std::string(limit, 'a')) + frame(0x80, "b")) == "5:1009");
    CHECK(code_of(frame(0x82, std::string(limit, 'a'))) == "1:" + std::string(limit, 'a'));
    // After a violation nothing else comes.
    ClientFrames frames(limit);
    const Data   bad = frame(0x83, "") + frame(0x82, "good");
    give(frames, bad.data(), bad.size());
    CHECK(frames.next() == Kind::violation && frames.next() == Kind::violation);
}

TEST(random_frames_end_or_wait) {
    std::mt19937 random(11);
    const Data   good = frame(0x02, "twenty bytes of data") + frame(0x89, "ping") + frame(0x80, std::string(30, 'q')) +
                      frame(0x82, "last");
    int          n_whole = 0, n_broken = 0;
    for (int i = 0; i < 20000; i++) {
        Data bytes = good;
        for (unsigned n = 1 + random() % 3; n > 0; n--) {
            bytes[random() % bytes.size()] = uint8_t(random());
        }
        const auto seen = read_all(bytes, 1 + random() % 400, &random);
        n_whole += seen.size() == 3;
        n_broken += !seen.empty() && seen.back().compare(0, 2, "5:") == 0;
    }
    CHECK(n_whole > 1000 && n_broken > 1000);
}

TEST(calls_are_decoded) {
    Call        call;
    CallMessage message;
    for (const Dtype dtype : { Dtype::f32, Dtype::bf16, Dtype::f16 }) {
        const Data bytes = call.encoded(dtype, Reduce::rows);
        CHECK(decode_call(bytes.data(), bytes.size(), message));
        CHECK(message.id == 0xffffffffffffffffu && message.model == "demo-0123" &&
              message.program == 0x1122334455667788u);
        CHECK(message.term == 3 && message.layer == 5 && message.reduce == Reduce::rows && message.n_rows == 2);
        CHECK(message.dtype == dtype && message.deadline_ms == 2000 && message.has_weight);
        CHECK(message.h.size == 8 * dtype_bytes(dtype) && message.row.size == 12 && message.expert.size == 12 &&
              message.weight.size == 12);
        CHECK(std::memcmp(message.expert.data, call.expert.data(), 12) == 0);
        for (size_t n = 0; n < bytes.size(); n++) {
            CHECK(!decode_call(Data(bytes.begin(), bytes.begin() + long(n)).data(), n, message));
        }
        Data longer = bytes;
        longer.push_back(0xc0);
        CHECK(!decode_call(longer.data(), longer.size(), message));
        Data unknown = bytes;
        unknown[0]++;
        for (const uint8_t byte : { 0xa1, 0x7a, 0x01 }) {
            unknown.push_back(byte);
        }
        CHECK(!decode_call(unknown.data(), unknown.size(), message));
    }
}

TEST(mutated_calls_are_decoded_or_not) {
    Call         call;
    std::mt19937 random(5);
    const Data   good = call.encoded();
    int          n_right = 0;
    for (int i = 0; i < 50000; i++) {
        Data bytes = good;
        for (unsigned n = 1 + random() % 3; n > 0; n--) {
            const size_t at = random() % bytes.size();
            switch (random() % 3) {
                case 0: bytes[at] = uint8_t(random()); break;
                case 1: bytes.erase(bytes.begin() + long(at)); break;
                default: bytes.insert(bytes.begin() + long(at), uint8_t(random())); break;
            }
        }
        CallMessage message;
        if (decode_call(bytes.data(), bytes.size(), message)) {
            n_right++;
            // What it points to lies in the message.
            for (const Bytes & field : { message.h, message.row, message.expert, message.weight }) {
                CHECK(field.size == 0 ||
                      (field.data >= bytes.data() && field.data + field.size <= bytes.data() + bytes.size()));
            }
        }
    }
    CHECK(n_right > 100);
}

TEST(replies_are_what_the_router_reads) {
    for (const uint64_t id : { uint64_t(0), uint64_t(200), ~uint64_t(0) }) {
        Data y(70000, 7), bytes(reply_part_max);
        bytes.resize(write_reply_head(id, y.size(), bytes.data()));
        bytes = bytes + y;
        Data tail(reply_part_max);
        tail.resize(write_reply_tail(~uint64_t(0), 12, tail.data()));
        bytes = bytes + tail;
        Reply       reply;
        std::string problem;
        CHECK(decode_reply(bytes.data(), bytes.size(), reply, problem));
        CHECK(reply.id == id && !reply.is_error && reply.y.size == y.size() && reply.compute_us == ~uint64_t(0) &&
              reply.queue_us == 12);
    }
}
