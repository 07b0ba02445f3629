// The proof of the swarm key against published vectors and against what Python's side makes of the same values.

#include "router/call_proof.hpp"
#include "common/check.hpp"
#include "router/handshake.hpp"

#include <cstdio>

using namespace swarm;

namespace {

std::string hex(const std::array<uint8_t, 32> & digest) {
    std::string text;
    for (const uint8_t byte : digest) {
        char pair[3];
        std::snprintf(pair, sizeof(pair), "%02x", byte);
        text += pair;
    }
    return text;
}

}  // namespace

TEST(sha256_gives_the_published_digests) {
    CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hex(sha256(std::string(1000, 'a'))) == "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
}

TEST(hmac_gives_the_codes_of_rfc_4231) {
    CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(a_proof_is_what_python_makes_of_it) {
    const std::string key = parse_call_key("5b60372e0536788936215756b0e6ec5a2bfa7733941ffb281d7251c2b21b3d7c");
    CHECK(key.size() == 32);
    const CallProof proof = prove_call(key, "/v1/ffn", "192.0.2.7:4101", std::string(48, 'A'), "cnonce-0123456789");
    CHECK(proof.mac == "d4435f9a88b191bb0559c95af62dd438564a0bfa2fdb7fbc9953ad490e314079");
    CHECK(proof.authorization ==
          "Swarm nonce=\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\", cnonce=\"cnonce-0123456789\", "
          "body=\"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\", "
          "mac=\"d4435f9a88b191bb0559c95af62dd438564a0bfa2fdb7fbc9953ad490e314079\"");
    const std::string info = "mac=\"9fb6e4d4cc430ad7a214b44a8c976387990b4f9c29e168a7c644a6cd489a6673\"";
    CHECK(answer_is_proved(key, proof, 101, info));
    CHECK(!answer_is_proved(key, proof, 200, info));
    CHECK(!answer_is_proved(key, proof, 101, ""));
    CHECK(!answer_is_proved(std::string(32, 'x'), proof, 101, info));
}

TEST(keys_and_nonces_from_outside_are_checked) {
    CHECK(parse_call_key("").empty());
    CHECK(parse_call_key(std::string(64, 'g')).empty());
    CHECK(parse_call_key(std::string(63, 'a')).empty());
    CHECK(nonce_in("Swarm nonce=\"abc-_9\", stale=true") == "abc-_9");
    CHECK(nonce_in("Basic realm=\"x\"").empty());
    CHECK(nonce_in("Swarm nonce=\"a\r\nb\"").empty());
    CHECK(nonce_in("Swarm nonce=\"\"").empty());
    CHECK(nonce_in("Swarm nonce=\"abc").empty());
    CHECK(nonce_in("Swarm nonce=\"" + std::string(200, 'a') + "\"").empty());
    CHECK(http_status("HTTP/1.1 401 Unauthorized\r\n\r\n") == 401);
    CHECK(http_header("HTTP/1.1 401 x\r\nA: b\r\nWWW-Authenticate:  Swarm x \r\n\r\n", "www-authenticate") ==
          "Swarm x");
}
