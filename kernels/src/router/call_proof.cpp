#include "router/call_proof.hpp"

#include <vector>

namespace swarm {

namespace {

// FIPS 180-4, section 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t round_constants[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
    0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
    0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
    0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
    0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
    0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
    0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u,
};

constexpr size_t block_bytes = 64;

uint32_t rotate(uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

void compress(uint32_t (&state)[8], const uint8_t * block) {
    uint32_t w[64];
    for (size_t i = 0; i < 16; i++) {
        const uint8_t * at = block + 4 * i;
        w[i] = uint32_t(at[0]) << 24 | uint32_t(at[1]) << 16 | uint32_t(at[2]) << 8 | uint32_t(at[3]);
    }
    for (size_t i = 16; i < 64; i++) {
        const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i]              = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8];
    for (size_t i = 0; i < 8; i++) {
        v[i] = state[i];
    }
    for (size_t i = 0; i < 64; i++) {
        const uint32_t s1     = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
        const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        const uint32_t t1     = v[7] + s1 + choice + round_constants[i] + w[i];
        const uint32_t s0     = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
        const uint32_t t2     = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        for (size_t k = 7; k > 0; k--) {
            v[k] = v[k - 1];
        }
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (size_t i = 0; i < 8; i++) {
        state[i] += v[i];
    }
}

std::string hex(const std::array<uint8_t, 32> & digest) {
    static const char digits[] = "0123456789abcdef";
    std::string       text;
    for (const uint8_t byte : digest) {
        text += digits[byte >> 4];
        text += digits[byte & 15];
    }
    return text;
}

// Takes as long wherever the texts differ.
bool equal_in_constant_time(std::string_view a, std::string_view b) {
    unsigned difference = a.size() == b.size() ? 0u : 1u;
    for (size_t i = 0; i < a.size() && i < b.size(); i++) {
        difference |= unsigned(uint8_t(a[i]) ^ uint8_t(b[i]));
    }
    return difference == 0;
}

}  // namespace

std::array<uint8_t, 32> sha256(std::string_view data) {
    uint32_t             state[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                     0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    std::vector<uint8_t> message(data.begin(), data.end());
    const uint64_t       n_bits = uint64_t(data.size()) * 8;
    message.push_back(0x80);
    while (message.size() % block_bytes != block_bytes - 8) {
        message.push_back(0);
    }
    for (int shift = 56; shift >= 0; shift -= 8) {
        message.push_back(uint8_t(n_bits >> shift));
    }
    for (size_t block = 0; block < message.size(); block += block_bytes) {
        compress(state, message.data() + block);
    }
    std::array<uint8_t, 32> digest{};
    for (size_t i = 0; i < digest.size(); i++) {
        digest[i] = uint8_t(state[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
}

std::array<uint8_t, 32> hmac_sha256(std::string_view key, std::string_view data) {
    std::string padded(key);
    if (padded.size() > block_bytes) {
        const auto digest = sha256(key);
        padded.assign(digest.begin(), digest.end());
    }
    padded.resize(block_bytes, '\0');
    std::string inner, outer;
    for (const char c : padded) {
        inner += char(c ^ 0x36);
        outer += char(c ^ 0x5c);
    }
    const auto digest = sha256(inner.append(data));
    return sha256(outer.append(digest.begin(), digest.end()));
}

std::string parse_call_key(std::string_view text) {
    const auto value = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
    std::string key;
    for (size_t i = 0; i + 1 < text.size() && text.size() == 64; i += 2) {
        const int high = value(text[i]);
        const int low  = value(text[i + 1]);
        if (high < 0 || low < 0) {
            return "";
        }
        key += char(high * 16 + low);
    }
    return key;
}

std::string nonce_in(std::string_view challenge) {
    constexpr std::string_view start     = "Swarm nonce=\"";
    constexpr size_t           max_chars = 128;
    if (challenge.substr(0, start.size()) != start) {
        return "";
    }
    challenge.remove_prefix(start.size());
    const size_t end = challenge.find('"');
    if (end == std::string_view::npos || end == 0 || end > max_chars) {
        return "";
    }
    for (const char c : challenge.substr(0, end)) {
        if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-')) {
            return "";
        }
    }
    return std::string(challenge.substr(0, end));
}

CallProof prove_call(std::string_view key, std::string_view target, std::string_view host, std::string_view nonce,
                     std::string_view cnonce) {
    const std::string body = hex(sha256(""));
    std::string       text = "swarm request 1\nGET\n";
    std::string       lower_host(host);
    for (char & c : lower_host) {
        c = c >= 'A' && c <= 'Z' ? char(c + 32) : c;
    }
    for (const std::string_view part : {target, std::string_view(lower_host), nonce, cnonce}) {
        text.append(part).append("\n");
    }
    text += body;
    const std::string mac = hex(hmac_sha256(key, text));
    return {"Swarm nonce=\"" + std::string(nonce) + "\", cnonce=\"" + std::string(cnonce) + "\", body=\"" + body +
                "\", mac=\"" + mac + "\"",
            mac};
}

bool answer_is_proved(std::string_view key, const CallProof & proof, int status, std::string_view authentication_info) {
    const std::string text = "swarm reply 1\n" + proof.mac + "\n" + std::to_string(status) + "\n-";
    return equal_in_constant_time("mac=\"" + hex(hmac_sha256(key, text)) + "\"", authentication_info);
}

}  // namespace swarm
