#pragma once
// Non-blocking, close-on-exec TCP and Unix sockets that never raise SIGPIPE.

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace swarm {

struct Address {
    sockaddr_storage storage = {};
    socklen_t        length  = 0;
    std::string      text;  // as HOST:PORT or unix:/path, for messages
};

// `host` is an IPv4 or IPv6 address or "localhost": looking a name up may block for longer than any deadline.
bool parse_address(const std::string & host, uint16_t port, Address & address, std::string & problem);

// "unix:/path", "HOST:PORT" or "[HOST]:PORT".
bool parse_address(const std::string & text, Address & address, std::string & problem);

// Starts to connect. -1 on failure; otherwise the socket, `connected` says whether that is done already.
int start_connect(const Address & address, bool & connected, std::string & problem);

// To be called once the socket became writable: whether the connection stands.
bool finish_connect(int fd, std::string & problem);

// Bytes taken; -1: try again when writable (readable); -2: broken, `problem` says how.
// receive_some: 0 is the peer's orderly close.
ptrdiff_t send_some(int fd, const void * data, size_t size, std::string & problem);
ptrdiff_t receive_some(int fd, void * data, size_t size, std::string & problem);

std::string error_text(int number);

}  // namespace swarm
