#pragma once
// The HTTP upgrade that opens a WebSocket (RFC 6455, section 4).

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace swarm {

std::array<uint8_t, 20> sha1(std::string_view data);
std::string             base64(const uint8_t * data, size_t size);

// The Sec-WebSocket-Accept that answers Sec-WebSocket-Key `key`.
std::string websocket_accept(std::string_view key);

// `authorization`: the header's value; empty: none.
std::string upgrade_request(const std::string & host_and_port, const std::string & path, const std::string & key,
                            const std::string & authorization = "");

// `head` is the server's answer up to and with the empty line. False: it does not open a WebSocket for `key`.
bool check_upgrade_response(std::string_view head, std::string_view key, std::string & problem);

// The status of an HTTP answer, 0 if it is none.
int http_status(std::string_view head);

// The value of a header (its name in lower case), empty if it is not there.
std::string_view http_header(std::string_view head, std::string_view name);

}  // namespace swarm
