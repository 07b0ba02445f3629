#include "common/net.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace swarm {

std::string error_text(int number) { return std::generic_category().message(number); }

bool parse_address(const std::string & host, uint16_t port, Address & address, std::string & problem) {
    const std::string number = std::to_string(port);
    addrinfo          hints  = {};
    hints.ai_family          = AF_UNSPEC;
    hints.ai_socktype        = SOCK_STREAM;
    hints.ai_flags           = AI_NUMERICHOST | AI_NUMERICSERV;
    addrinfo *  found        = nullptr;
    const char * numeric     = host == "localhost" ? "127.0.0.1" : host.c_str();
    if (port == 0 || host.empty() || getaddrinfo(numeric, number.c_str(), &hints, &found) != 0 || !found) {
        problem = "\"" + host.substr(0, 64) + "\" port " + number +
                  " is not an IP address (or localhost) and a port from 1 to 65535";
        return false;
    }
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.length = socklen_t(found->ai_addrlen);
    address.text   = (host.find(':') != std::string::npos ? "[" + host + "]" : host) + ":" + number;
    freeaddrinfo(found);
    return true;
}

bool parse_address(const std::string & text, Address & address, std::string & problem) {
    if (text.compare(0, 5, "unix:") == 0) {
        sockaddr_un       local = {};
        const std::string path  = text.substr(5);
        if (path.empty() || path.size() >= sizeof(local.sun_path)) {
            problem = "the socket path \"" + path.substr(0, 200) + "\" is empty or longer than this system allows (" +
                      std::to_string(sizeof(local.sun_path) - 1) + " bytes)";
            return false;
        }
        local.sun_family = AF_UNIX;
        std::memcpy(local.sun_path, path.c_str(), path.size() + 1);
        std::memcpy(&address.storage, &local, sizeof(local));
        address.length = socklen_t(sizeof(local));
        address.text   = text;
        return true;
    }
    const size_t colon = text.rfind(':');
    std::string  host  = colon == std::string::npos ? "" : text.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        host = host.substr(1, host.size() - 2);
    }
    unsigned port = 0;
    for (size_t i = colon == std::string::npos ? text.size() : colon + 1; i < text.size(); i++) {
        const char digit = text[i];
        port             = digit >= '0' && digit <= '9' && port <= 65535 ? port * 10 + unsigned(digit - '0') : 65536;
    }
    if (host.empty() || port == 0 || port > 65535) {
        problem = "\"" + text.substr(0, 200) + "\" is neither unix:/path nor HOST:PORT";
        return false;
    }
    return parse_address(host, uint16_t(port), address, problem);
}

int start_connect(const Address & address, bool & connected, std::string & problem) {
    const int fd = socket(address.storage.ss_family, SOCK_STREAM, 0);
    if (fd < 0) {
        problem = "no socket: " + error_text(errno);
        return -1;
    }
    const int flags = fcntl(fd, F_GETFL);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        problem = "cannot make the socket non-blocking: " + error_text(errno);
        close(fd);
        return -1;
    }
    const int on = 1;
    if (address.storage.ss_family != AF_UNIX) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
#ifdef SO_NOSIGPIPE
    setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
    connected = connect(fd, reinterpret_cast<const sockaddr *>(&address.storage), address.length) == 0;
    if (!connected && errno != EINPROGRESS && errno != EINTR) {
        problem = "cannot connect to " + address.text + ": " + error_text(errno);
        close(fd);
        return -1;
    }
    return fd;
}

bool finish_connect(int fd, std::string & problem) {
    int       number = 0;
    socklen_t length = sizeof(number);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &number, &length) != 0) {
        number = errno;
    }
    if (number != 0) {
        problem = "cannot connect: " + error_text(number);
    }
    return number == 0;
}

ptrdiff_t send_some(int fd, const void * data, size_t size, std::string & problem) {
#ifdef MSG_NOSIGNAL
    const int flags = MSG_NOSIGNAL;
#else
    const int flags = 0;
#endif
    for (;;) {
        const ssize_t n = send(fd, data, size, flags);
        if (n >= 0) {
            return n;
        }
        if (errno == EINTR) {
            continue;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return -1;
        }
        problem = "sending failed: " + error_text(errno);
        return -2;
    }
}

ptrdiff_t receive_some(int fd, void * data, size_t size, std::string & problem) {
    for (;;) {
        const ssize_t n = recv(fd, data, size, 0);
        if (n >= 0) {
            return n;
        }
        if (errno == EINTR) {
            continue;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return -1;
        }
        problem = "receiving failed: " + error_text(errno);
        return -2;
    }
}

}  // namespace swarm
