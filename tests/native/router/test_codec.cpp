// msgpack, float formats, the expert call's golden bytes, SHA-1 and base64, the routing table.

#include "common/check.hpp"

#include "common/floats.hpp"
#include "router/handshake.hpp"
#include "router/routing.hpp"
#include "router/wire.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

using namespace swarm;

namespace {

const char request_hex[] =
    "8ea17601a2696407a56d6f64656ca964656d6f2d30313233a770726f6772616dcf1122334455667788a47465726d03a56c6179657205a672"
    "6564756365a4726f7773a4726f777302a56474797065a3663332a168c4200000003f000080bf000000400000803e0000c03f000000000000"
    "00be00004040a3726f77c40c000000000000000001000000a6657870657274c40c020000000500000000000000a6776569676874c40c0000"
    "803e0000403f0000803fab646561646c696e655f6d73cd07d0";
const char reply_hex[] =
    "85a17601a2696407a179c4300000803f000000400000404000008040000080bf000000c0000040c0000080c00000003f0000803e0000003e"
    "00000080aa636f6d707574655f757378a871756575655f7573cd012c";
const char error_hex[] =
    "83a17601a2696407a56572726f7285a46b696e64a96e6f745f7265616479a76d657373616765b26c617965722035206973206c6f6164696e"
    "67a56c6179657205a765787065727473920205a57265747279c3";

std::vector<uint8_t> from_hex(const std::string & hex) {
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
        bytes.push_back(uint8_t(std::stoi(hex.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

struct GoldenRequest {
    float         rows[2][4] = {{0.5f, -1, 2, 0.25f}, {1.5f, 0, -0.125f, 3}};
    const float * h[2]       = {rows[0], rows[1]};
    int32_t       row[3]     = {0, 0, 1};
    int32_t       expert[3]  = {2, 5, 0};
    float         weight[3]  = {0.25f, 0.75f, 1};
    Request       request;
    GoldenRequest() {
        request.id          = 7;
        request.model       = "demo-0123";
        request.program     = 0x1122334455667788u;
        request.term        = 3;
        request.layer       = 5;
        request.n_rows      = 2;
        request.n_pairs     = 3;
        request.n_in        = 4;
        request.n_h         = 2;
        request.h           = h;
        request.row         = row;
        request.expert      = expert;
        request.weight      = weight;
        request.deadline_ms = 2000;
    }
};

std::vector<uint8_t> encoded(const Request & request, uint32_t mask = 0) {
    std::vector<uint8_t> buffer(request_bytes_bound(request));
    MsgpackWriter        writer(buffer.data(), buffer.size(), mask);
    std::string          problem;
    CHECK(encode_request(request, writer, problem));
    buffer.resize(writer.size());
    return buffer;
}

// A copy of exactly these bytes on the heap, so that the sanitizer sees any read beyond them.
bool decode(const uint8_t * data, size_t size, Reply & reply, std::string & problem) {
    static std::vector<uint8_t> exact;
    exact = std::vector<uint8_t>(data, data + size);
    exact.shrink_to_fit();
    return decode_reply(exact.data(), exact.size(), reply, problem);
}

bool decode(const std::vector<uint8_t> & message, Reply & reply, std::string & problem) {
    return decode(message.data(), message.size(), reply, problem);
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Straight from the definition, in double.
double f16_value(uint16_t half) {
    const int    exponent = half >> 10 & 31;
    const double fraction = half & 1023;
    const double size     = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                            : exponent == 0 ? std::ldexp(fraction, -24)
                                            : std::ldexp(1024 + fraction, exponent - 25);
    return half & 0x8000 ? -size : size;
}

}  // namespace

TEST(golden_request) {
    const GoldenRequest golden;
    CHECK(encoded(golden.request) == from_hex(request_hex));
    Request unweighted = golden.request;
    unweighted.weight  = nullptr;
    const auto bytes   = encoded(unweighted);
    CHECK(bytes[0] == 0x8d);
    CHECK(std::string(bytes.begin(), bytes.end()).find("weight") == std::string::npos);
}

TEST(golden_replies) {
    Reply       reply;
    std::string problem;
    const auto  message = from_hex(reply_hex);
    CHECK(decode(message, reply, problem));
    const float expected[12] = {1, 2, 3, 4, -1, -2, -3, -4, 0.5f, 0.25f, 0.125f, -0.0f};
    CHECK(!reply.is_error && reply.version == 1 && reply.id == 7 && reply.compute_us == 120 && reply.queue_us == 300);
    CHECK(reply.y.size == sizeof(expected) && std::memcmp(reply.y.data, expected, sizeof(expected)) == 0);

    CHECK(decode(from_hex(error_hex), reply, problem));
    CHECK(reply.is_error && reply.id == 7 && reply.error.kind == "not_ready" &&
          reply.error.message == "layer 5 is loading");
    CHECK(reply.error.layer == 5 && reply.error.retry && reply.error.n_experts == 2);
    CHECK(reply.error.experts[0] == 2 && reply.error.experts[1] == 5);
}

TEST(masked_writing_is_the_plain_message_xored) {
    const GoldenRequest golden;
    const auto          plain  = encoded(golden.request);
    const uint32_t      mask   = 0x9a5b3c7du;
    auto                masked = encoded(golden.request, mask);
    CHECK(masked != plain);
    for (size_t i = 0; i < masked.size(); i++) {
        masked[i] = uint8_t(masked[i] ^ (mask >> (8 * (i % 4))));
    }
    CHECK(masked == plain);
    for (size_t n = 0; n < 40; n++) {
        std::vector<uint8_t> source(n), target(n);
        for (size_t i = 0; i < n; i++) {
            source[i] = uint8_t(i * 37 + 11);
        }
        masked_copy(target.data(), source.data(), n, mask);
        for (size_t i = 0; i < n; i++) {
            CHECK(target[i] == uint8_t(source[i] ^ (mask >> (8 * (i % 4)))));
        }
    }
}

TEST(request_refused_where_floats_do_not_fit) {
    GoldenRequest golden;
    golden.rows[1][2]     = 70000.0f;
    golden.request.dtype  = Dtype::f16;
    std::vector<uint8_t> buffer(request_bytes_bound(golden.request));
    MsgpackWriter        writer(buffer.data(), buffer.size());
    std::string          problem;
    CHECK(!encode_request(golden.request, writer, problem));
    CHECK_CONTAINS(problem, "f16");
    golden.request.dtype = Dtype::bf16;
    const auto bytes     = encoded(golden.request);
    CHECK(bytes.size() ==
          from_hex(request_hex).size() - 16 + 1);  // half the values' bytes; "bf16" is longer than "f32"
}

TEST(request_into_too_small_buffers) {
    const GoldenRequest golden;
    const size_t        full = from_hex(request_hex).size();
    for (size_t size = 0; size < full; size++) {
        std::vector<uint8_t> buffer(size);
        MsgpackWriter        writer(buffer.data(), buffer.size());
        std::string          problem;
        CHECK(!encode_request(golden.request, writer, problem));
    }
}

TEST(replies_cut_at_every_byte) {
    for (const char * hex : {reply_hex, error_hex}) {
        const auto message = from_hex(hex);
        for (size_t size = 0; size < message.size(); size++) {
            Reply       reply;
            std::string problem;
            CHECK(!decode(message.data(), size, reply, problem));
            CHECK(!problem.empty());
        }
        auto longer = message;
        longer.push_back(0xc0);
        Reply       reply;
        std::string problem;
        CHECK(!decode(longer, reply, problem));
    }
}

TEST(replies_with_hostile_lengths) {
    Reply       reply;
    std::string problem;
    for (const char * hex : {
             "dfffffffff",                                    // a map of 2^32-1
             "81a179c6ffffffff00",                            // bin of 2^32-1
             "81a178ddffffffff00",                            // array of 2^32-1
             "81a178dbffffffff00",                            // str of 2^32-1
             "82a17601a17601",                                // a key twice
             "83a17602a2696407a179c400",                      // version 2
             "82a2696407a179c400",                            // no version
             "82a17601a179c400",                              // no id
             "82a17601a2696407",                              // neither y nor error
             "83a17601a26964ffa179c400",                      // id -1
             "83a17601a2696407a1799100",                      // y is an array
             "83a17601a2696407a17904",                        // y is a number
             "8301010203a179c400",                            // keys that are no text
             "84a17601a2696407a179c400a178c70100ff",          // an ext type
             "84a17601a2696407a179c400a178c1",                // the unused type
             "83a17601a2696407a56572726f7281a46b696e64a178",  // an error without message
             "83a17601a2696407a56572726f7283a46b696e64a178a76d657373616765a178a765787065727473dc00110000000000000000000"
             "000000000000000",
             "84a17601a2696407a179c400a178919191919191919100",  // nesting: deeper than 8
         }) {
        CHECK(!decode(from_hex(hex), reply, problem));
        CHECK(!problem.empty());
    }
    // Unknown fields of every known type are passed over, at the deepest nesting allowed.
    CHECK(
        decode(from_hex("8ba17601a2696407a179c400a161ca00000000a162cbffffffffffffffffa163c0a164c3a165d38000000000000000"
                        "a1669191919191919105a167d90161a16882a16101a162e0"),
               reply, problem));
    CHECK(reply.id == 7 && reply.y.size == 0);
    // Integers in longer forms than needed are the same integers.
    CHECK(decode(from_hex("83a176d30000000000000001a26964cf0000000000000007a179c400"), reply, problem));
    CHECK(reply.id == 7);
}

TEST(decoder_survives_random_bytes) {
    std::mt19937_64 random(12345);
    size_t          n_accepted = 0;
    for (int round = 0; round < 200000; round++) {
        auto message = from_hex(round % 2 ? reply_hex : error_hex);
        if (round % 3 == 0) {
            message.resize(random() % 64);
            for (uint8_t & byte : message) {
                byte = uint8_t(random());
            }
        } else {
            for (int i = 0; i < 1 + round % 4; i++) {
                message[random() % message.size()] = uint8_t(random());
            }
        }
        Reply       reply;
        std::string problem;
        if (decode(message, reply, problem)) {
            n_accepted++;
            CHECK(reply.is_error || reply.y.size <= message.size());
        } else {
            CHECK(!problem.empty());
        }
    }
    CHECK(n_accepted > 1000);  // the mutations are mild enough to reach the depths of the decoder
}

TEST(f16_against_its_definition) {
    std::mt19937 random(1);
    for (uint32_t half = 0; half < 65536; half++) {
        const uint16_t stored = uint16_t(half);
        float          value  = 0;
        const bool     finite = decode_floats(Dtype::f16, &stored, 1, &value);
        const double   expect = f16_value(stored);
        CHECK(finite == std::isfinite(expect));
        CHECK(std::isnan(expect) ? std::isnan(value)
                                 : double(value) == expect && std::signbit(value) == std::signbit(expect));
        uint16_t again = 0;
        CHECK(encode_floats(Dtype::f16, &value, 1, &again));
        CHECK(std::isnan(expect) ? std::isnan(f16_value(again)) : again == stored);

        // Between this value and the next: halfway goes to the even one, anything else to the nearer.
        if (half < 0x7bff) {
            const double next = f16_value(uint16_t(half + 1));
            const float  middle = float((expect + next) / 2), below = std::nextafter(middle, 0.0f),
                        above = std::nextafter(middle, INFINITY);
            uint16_t     result[3];
            const float  values[3] = {below, middle, above};
            CHECK(encode_floats(Dtype::f16, values, 3, result));
            CHECK(result[0] == half && result[1] == (half % 2 ? half + 1 : half) && result[2] == half + 1);
        }
    }
    uint16_t    stored[2];
    const float edge[2] = {65519.996f, -65519.996f}, over[2] = {1, -65520.0f}, infinite[2] = {INFINITY, -INFINITY};
    CHECK(encode_floats(Dtype::f16, edge, 2, stored) && stored[0] == 0x7bff && stored[1] == 0xfbff);
    CHECK(!encode_floats(Dtype::f16, over, 2, stored));
    CHECK(encode_floats(Dtype::f16, infinite, 2, stored) && stored[0] == 0x7c00 && stored[1] == 0xfc00);
}

TEST(bf16_rounds_to_nearest_even) {
    const struct { uint32_t f32; uint16_t bf16; } cases[] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0x3f807fff, 0x3f80},
        {0x80000000, 0x8000}, {0x00000001, 0x0000}, {0x7f800000, 0x7f80}, {0xff800000, 0xff80}, {0x7f7f7fff, 0x7f7f},
    };
    for (const auto & item : cases) {
        const float value  = float_of(item.f32);
        uint16_t    stored = 0;
        CHECK(encode_floats(Dtype::bf16, &value, 1, &stored) && stored == item.bf16);
        float back = 0;
        CHECK(decode_floats(Dtype::bf16, &stored, 1, &back) == std::isfinite(value));
        CHECK(bits_of(back) == uint32_t(item.bf16) << 16);
    }
    const float nan = float_of(0x7f800001), biggest = std::numeric_limits<float>::max();
    uint16_t    stored = 0;
    CHECK(encode_floats(Dtype::bf16, &nan, 1, &stored) && (stored & 0x7fff) > 0x7f80);
    CHECK(!encode_floats(Dtype::bf16, &biggest, 1, &stored));  // it would become infinite
}

TEST(non_finite_values_are_seen_wherever_they_stand) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        for (const float bad : {float(NAN), float(INFINITY), float(-INFINITY)}) {
            for (size_t at = 0; at < 37; at++) {
                std::vector<float> values(37, 0.5f), target(37, 1.0f);
                std::vector<uint8_t> stored(37 * dtype_bytes(dtype) + 1);
                CHECK(encode_floats(dtype, values.data(), 37, stored.data() + 1));
                CHECK(accumulate_floats(dtype, stored.data() + 1, 37, target.data()) && target[at] == 1.5f);
                values[at] = bad;
                encode_floats(dtype, values.data(), 37, stored.data() + 1);
                CHECK(!decode_floats(dtype, stored.data() + 1, 37, target.data()));
                CHECK(!accumulate_floats(dtype, stored.data() + 1, 37, target.data()));
            }
        }
    }
}

TEST(handshake_of_the_rfc) {
    CHECK(websocket_accept("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    std::string hex;
    for (const uint8_t byte : sha1(std::string(200, 'a'))) {
        char text[3];
        std::snprintf(text, sizeof(text), "%02x", byte);
        hex += text;
    }
    CHECK(hex == "e61cfffe0d9195a525fc6cf06ca2d77119c24a40");
    const uint8_t bytes[] = {'f', 'o', 'o', 'b'};
    CHECK(base64(bytes, 1) == "Zg==" && base64(bytes, 2) == "Zm8=" && base64(bytes, 3) == "Zm9v" &&
          base64(bytes, 4) == "Zm9vYg==");

    const std::string key  = "dGhlIHNhbXBsZSBub25jZQ==";
    const std::string good =
        "HTTP/1.1 101 Switching Protocols\r\nUPGRADE: WebSocket\r\nConnection: keep-alive, upgrade\r\n"
        "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
    std::string problem;
    CHECK(check_upgrade_response(good, key, problem));
    for (const char * removed : {"UPGRADE: WebSocket\r\n", "Connection: keep-alive, upgrade\r\n",
                                 "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"}) {
        std::string bad = good;
        bad.erase(bad.find(removed), std::strlen(removed));
        CHECK(!check_upgrade_response(bad, key, problem));
    }
    CHECK(!check_upgrade_response(good, "AGhlIHNhbXBsZSBub25jZQ==", problem));
    CHECK_CONTAINS(problem, "Sec-WebSocket-Accept");
    std::string extended = good;
    extended.insert(extended.size() - 2, "Sec-WebSocket-Extensions: permessage-deflate\r\n");
    CHECK(!check_upgrade_response(extended, key, problem));
    CHECK(!check_upgrade_response("HTTP/1.1 404 Not Found\r\n\r\n", key, problem));
    CHECK_CONTAINS(problem, "404 Not Found");
}

namespace {

const std::string good_table =
    R"({"version": 1, "sequence": 7, "term": 3, "model": "demo-0123", "reduce": "rows", "dtype": "f32",
        "deadline_floor_ms": 2000,
        "nodes": [{"name": "alpha", "host": "127.0.0.1", "port": 4101}, {"name": "beta", "host": "::1", "port": 4102}],
        "slices": [{"layer": 0, "first": 3, "last": 7, "nodes": [1, 0]},
                   {"layer": 0, "first": 0, "last": 2, "nodes": [0]},
                   {"layer": 2, "first": 0, "last": 3, "nodes": [0]},
                   {"layer": 2, "first": 6, "last": 7, "nodes": [0]}]})";

std::string with(const std::string & from, const std::string & to) {
    std::string text = good_table;
    const size_t at  = text.find(from);
    CHECK(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

}  // namespace

TEST(routing_table_lookup) {
    std::string problem;
    const auto  table = RoutingTable::parse(good_table, problem);
    CHECK(table != nullptr);
    if (!table) {
        return;
    }
    CHECK(table->term == 3 && table->sequence == 7 && table->model == "demo-0123" && table->nodes().size() == 2);
    CHECK(table->n_expert(0) == 8 && table->n_expert(1) == 0 && table->n_expert(9) == 0 && table->n_expert(-1) == 0);
    const auto node = [&](int layer, int expert) {
        const int slice = table->slice_of(layer, expert);
        return slice < 0 ? -1 : table->slices()[size_t(slice)].nodes.front();
    };
    CHECK(node(0, 0) == 0 && node(0, 2) == 0 && node(0, 3) == 1 && node(0, 7) == 1 && node(2, 7) == 0);
    CHECK(node(0, 8) == -1 && node(0, -1) == -1 && node(1, 0) == -1 && node(2, 4) == -1 && node(3, 0) == -1 &&
          node(-1, 0) == -1);
    CHECK(table->missing(0).empty());
    CHECK_CONTAINS(table->missing(2), "experts 4 to 5 of layer 2");
    CHECK_CONTAINS(table->missing(1), "layer 1");
    CHECK(!table->newer_than(*table));
    CHECK(RoutingTable::parse(with("\"sequence\": 7", "\"sequence\": 8"), problem)->newer_than(*table));
    CHECK(!RoutingTable::parse(with("\"term\": 3", "\"term\": 2"), problem)->newer_than(*table));
}

TEST(routing_table_refusals) {
    const struct { std::string text, expected; } cases[] = {
        {"", "not a JSON object"},
        {"[1]", "not a JSON object"},
        {with("\"version\": 1", "\"version\": 2"), "version 2"},
        {with("\"sequence\": 7", "\"sequence\": -7"), "sequence"},
        {with("\"term\": 3", "\"term\": 3.5"), "term"},
        {with("demo-0123", "Demo"), "model"},
        {with("\"rows\"", "\"mean\""), "reduce"},
        {with("f32", "f64"), "dtype"},
        {with("\"deadline_floor_ms\": 2000", "\"deadline_floor_ms\": 0"), "deadline_floor_ms"},
        {with("beta", "alpha"), "alpha"},
        {with("127.0.0.1", "no.such.host"), "no.such.host"},
        {with("4102", "70000"), "port"},
        {with("[1, 0]", "[1, 1]"), "layer 0, experts 3 to 7"},
        {with("[1, 0]", "[2]"), "layer 0, experts 3 to 7"},
        {with("[1, 0]", "[]"), "layer 0, experts 3 to 7"},
        {with("\"first\": 3", "\"first\": 2"), "layer 0, expert 2: in more than one slice"},
        {with("\"first\": 3, \"last\": 7", "\"first\": 3, \"last\": 1"), "layer 0"},
        {with("\"last\": 7", "\"last\": 100000"), "last"},
        {with("\"layer\": 2", "\"layer\": 4000000000"), "layer"},
        {std::string(100000, '['), "not a JSON object"},
    };
    for (const auto & item : cases) {
        std::string problem;
        CHECK(RoutingTable::parse(item.text, problem) == nullptr);
        CHECK_CONTAINS(problem, item.expected);
    }
    std::mt19937_64 random(7);
    for (int round = 0; round < 3000; round++) {  // any text gives a table or a problem, never a crash
        std::string text = good_table;
        for (int i = 0; i < 3; i++) {
            text[random() % text.size()] = char(random() % 256);
        }
        std::string problem;
        CHECK(RoutingTable::parse(text, problem) != nullptr || !problem.empty());
    }
}
