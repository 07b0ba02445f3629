#include "router/handshake.hpp"

#include <algorithm>
#include <vector>

namespace swarm {

std::array<uint8_t, 20> sha1(std::string_view data) {
    uint32_t             state[5] = {0x67452301u, 0xefcdab89u, 0x98badcfeu, 0x10325476u, 0xc3d2e1f0u};
    std::vector<uint8_t> message(data.begin(), data.end());
    const uint64_t       n_bits = uint64_t(data.size()) * 8;
    message.push_back(0x80);
    while (message.size() % 64 != 56) {
        message.push_back(0);
    }
    for (int shift = 56; shift >= 0; shift -= 8) {
        message.push_back(uint8_t(n_bits >> shift));
    }
    const auto rotate = [](uint32_t value, int bits) { return (value << bits) | (value >> (32 - bits)); };
    for (size_t block = 0; block < message.size(); block += 64) {
        uint32_t w[80];
        for (size_t i = 0; i < 16; i++) {
            const uint8_t * at = message.data() + block + i * 4;
            w[i] = uint32_t(at[0]) << 24 | uint32_t(at[1]) << 16 | uint32_t(at[2]) << 8 | uint32_t(at[3]);
        }
        for (size_t i = 16; i < 80; i++) {
            w[i] = rotate(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
        for (size_t i = 0; i < 80; i++) {
            const uint32_t f    = i < 20              ? ((b & c) | (~b & d))
                                  : i < 40 || i >= 60 ? (b ^ c ^ d)
                                                      : ((b & c) | (b & d) | (c & d));
            const uint32_t k = i < 20 ? 0x5a827999u : i < 40 ? 0x6ed9eba1u : i < 60 ? 0x8f1bbcdcu : 0xca62c1d6u;
            const uint32_t next = rotate(a, 5) + f + e + k + w[i];
            e = d;
            d = c;
            c = rotate(b, 30);
            b = a;
            a = next;
        }
        state[0] += a;
        state[1] += b;
        state[2] += c;
        state[3] += d;
        state[4] += e;
    }
    std::array<uint8_t, 20> digest{};
    for (size_t i = 0; i < 20; i++) {
        digest[i] = uint8_t(state[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
}

std::string base64(const uint8_t * data, size_t size) {
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string       text;
    for (size_t i = 0; i < size; i += 3) {
        const size_t   n     = size - i < 3 ? size - i : 3;
        const uint32_t group = uint32_t(data[i]) << 16 | (n > 1 ? uint32_t(data[i + 1]) << 8 : 0u) |
                               (n > 2 ? uint32_t(data[i + 2]) : 0u);
        text += alphabet[group >> 18];
        text += alphabet[group >> 12 & 63];
        text += n > 1 ? alphabet[group >> 6 & 63] : '=';
        text += n > 2 ? alphabet[group & 63] : '=';
    }
    return text;
}

std::string websocket_accept(std::string_view key) {
    const auto digest = sha1(std::string(key) + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    return base64(digest.data(), digest.size());
}

std::string upgrade_request(const std::string & host_and_port, const std::string & path, const std::string & key,
                            const std::string & authorization) {
    return "GET " + path + " HTTP/1.1\r\nHost: " + host_and_port +
           "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: " + key +
           "\r\nSec-WebSocket-Version: 13\r\n" +
           (authorization.empty() ? "" : "Authorization: " + authorization + "\r\n") + "\r\n";
}

namespace {

std::string lower(std::string_view text) {
    std::string result(text);
    for (char & c : result) {
        c = c >= 'A' && c <= 'Z' ? char(c + 32) : c;
    }
    return result;
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) {
        text.remove_prefix(1);
    }
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) {
        text.remove_suffix(1);
    }
    return text;
}

bool has_token(const std::string & list, std::string_view token) {
    for (size_t begin = 0; begin <= list.size();) {
        const size_t comma = std::min(list.find(',', begin), list.size());
        if (trimmed(std::string_view(list).substr(begin, comma - begin)) == token) {
            return true;
        }
        begin = comma + 1;
    }
    return false;
}

}  // namespace

bool check_upgrade_response(std::string_view head, std::string_view key, std::string & problem) {
    const std::string_view status = head.substr(0, head.find("\r\n"));
    if (status.substr(0, 9) != "HTTP/1.1 " || status.substr(9, 3) != "101" ||
        (status.size() > 12 && status[12] != ' ')) {
        problem = "the WebSocket upgrade was refused: ";
        for (const char c : status.substr(0, 80)) {
            problem += c >= ' ' && c <= '~' ? c : '?';
        }
        return false;
    }
    bool upgrade = false, connection = false, accept = false;
    for (size_t begin = status.size() + 2; begin < head.size();) {
        const size_t           end   = std::min(head.find("\r\n", begin), head.size());
        const std::string_view line  = head.substr(begin, end - begin);
        const size_t           colon = line.find(':');
        begin                        = end + 2;
        if (colon == std::string_view::npos) {
            continue;
        }
        const std::string      name  = lower(line.substr(0, colon));
        const std::string_view value = trimmed(line.substr(colon + 1));
        if (name == "upgrade") {
            upgrade = lower(value) == "websocket";
        } else if (name == "connection") {
            connection = connection || has_token(lower(value), "upgrade");
        } else if (name == "sec-websocket-accept") {
            accept = value == websocket_accept(key);
        } else if (name == "sec-websocket-extensions" || name == "sec-websocket-protocol") {
            problem = "the server switched on a WebSocket extension or subprotocol that was not asked for";
            return false;
        }
    }
    if (!upgrade || !connection || !accept) {
        problem = "the answer to the WebSocket upgrade has a wrong " +
                  std::string(!upgrade ? "Upgrade" : !connection ? "Connection" : "Sec-WebSocket-Accept") + " header";
        return false;
    }
    return true;
}

int http_status(std::string_view head) {
    if (head.substr(0, 9) != "HTTP/1.1 " || head.size() < 12) {
        return 0;
    }
    int status = 0;
    for (const char c : head.substr(9, 3)) {
        if (c < '0' || c > '9') {
            return 0;
        }
        status = status * 10 + (c - '0');
    }
    return status;
}

std::string_view http_header(std::string_view head, std::string_view name) {
    for (size_t begin = head.find("\r\n"); begin != std::string_view::npos; begin = head.find("\r\n", begin + 2)) {
        const std::string_view line  = head.substr(begin + 2, head.find("\r\n", begin + 2) - begin - 2);
        const size_t           colon = line.find(':');
        if (colon != std::string_view::npos && lower(line.substr(0, colon)) == name) {
            return trimmed(line.substr(colon + 1));
        }
    }
    return {};
}

}  // namespace swarm
