#pragma once
// Proves the swarm key when a WebSocket is opened: docs/security.md, "The proof".

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace swarm {

std::array<uint8_t, 32> sha256(std::string_view data);
std::array<uint8_t, 32> hmac_sha256(std::string_view key, std::string_view data);

// 32 bytes from 64 hexadecimal digits; empty when it is not that.
std::string parse_call_key(std::string_view hex);

// The nonce in a WWW-Authenticate header of ours; empty when there is none.
std::string nonce_in(std::string_view challenge);

struct CallProof {
    std::string authorization;  // the header's value
    std::string mac;            // what the reply's proof is made from
};

// For a GET without a body. `cnonce`: 16 to 64 characters of base64url, never used before.
CallProof prove_call(std::string_view key, std::string_view target, std::string_view host, std::string_view nonce,
                     std::string_view cnonce);

// Whether Authentication-Info of an answer with `status`, whose body is streamed, proves the key.
bool answer_is_proved(std::string_view key, const CallProof & proof, int status, std::string_view authentication_info);

}  // namespace swarm
