#include "expert_server/tensor_files.hpp"

#include "ggml-backend.h"
#include "ggml.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace swarm {

namespace {

class File {
  public:
    explicit File(const std::string & path) : path_(path), descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
        if (descriptor_ < 0) {
            throw LoadError("cannot open '" + path + "': " + std::strerror(errno));
        }
    }
    ~File() { close(descriptor_); }
    File(const File &) = delete;
    File & operator=(const File &) = delete;

    void read(uint64_t offset, char * target, size_t bytes) const {
        while (bytes > 0) {
            const ssize_t n = pread(descriptor_, target, bytes, static_cast<off_t>(offset));
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n < 0) {
                throw LoadError("cannot read '" + path_ + "' at byte " + std::to_string(offset) + ": " +
                                std::strerror(errno));
            }
            if (n == 0) {
                throw LoadError("'" + path_ + "' ends at byte " + std::to_string(offset) + ", " +
                                std::to_string(bytes) + " bytes early; the file is not complete");
            }
            offset += static_cast<uint64_t>(n);
            target += n;
            bytes -= static_cast<size_t>(n);
        }
    }

  private:
    std::string path_;
    int         descriptor_;
};

}  // namespace

void read_tensor(const std::vector<TensorPart> & parts, ggml_tensor * tensor) {
    constexpr size_t chunk_bytes = size_t{ 8 } << 20;
    const bool        host       = ggml_backend_buffer_is_host(tensor->buffer);
    std::vector<char> staging;
    size_t            position = 0;
    for (const TensorPart & part : parts) {
        const File file(part.path);
        if (host) {
            file.read(part.offset, static_cast<char *>(tensor->data) + position, part.bytes);
            position += part.bytes;
            continue;
        }
        staging.resize(chunk_bytes);
        for (uint64_t done = 0; done < part.bytes;) {
            const size_t n = std::min<uint64_t>(chunk_bytes, part.bytes - done);
            file.read(part.offset + done, staging.data(), n);
            ggml_backend_tensor_set(tensor, staging.data(), position, n);
            done += n;
            position += n;
        }
    }
}

}  // namespace swarm
