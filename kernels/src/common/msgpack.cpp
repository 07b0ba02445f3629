#include "common/msgpack.hpp"

#include <cstring>

namespace swarm {

namespace {

inline uint32_t rotate_right(uint32_t value, unsigned bits) {
    return bits == 0 ? value : (value >> bits) | (value << (32 - bits));
}

}  // namespace

void masked_copy(uint8_t * __restrict dst, const uint8_t * __restrict src, size_t n, uint32_t mask) {
    const uint64_t wide = uint64_t(mask) << 32 | mask;
    const size_t   n_words = n / 8;
    for (size_t i = 0; i < n_words; i++) {
        uint64_t word;
        std::memcpy(&word, src + i * 8, 8);
        word ^= wide;
        std::memcpy(dst + i * 8, &word, 8);
    }
    for (size_t i = n_words * 8; i < n; i++) {
        dst[i] = uint8_t(src[i] ^ (mask >> (8 * (i % 4))));
    }
}

void MsgpackWriter::raw(const void * data, size_t n_bytes) {
    if (n_bytes > size_t(end_ - at_)) {
        overflowed_ = true;
        return;
    }
    const unsigned phase = unsigned(size() % 4);
    masked_copy(at_, static_cast<const uint8_t *>(data), n_bytes, rotate_right(mask_, 8 * phase));
    at_ += n_bytes;
}

void MsgpackWriter::head(uint8_t type, uint64_t value, unsigned n_bytes) {
    uint8_t bytes[9] = {type};
    for (unsigned i = 0; i < n_bytes; i++) {
        bytes[1 + i] = uint8_t(value >> (8 * (n_bytes - 1 - i)));
    }
    raw(bytes, 1 + n_bytes);
}

void MsgpackWriter::map(uint32_t n_pairs) {
    if (n_pairs < 16) {
        head(uint8_t(0x80 | n_pairs), 0, 0);
    } else if (n_pairs <= 0xffff) {
        head(0xde, n_pairs, 2);
    } else {
        head(0xdf, n_pairs, 4);
    }
}

void MsgpackWriter::array(uint32_t n_items) {
    if (n_items < 16) {
        head(uint8_t(0x90 | n_items), 0, 0);
    } else if (n_items <= 0xffff) {
        head(0xdc, n_items, 2);
    } else {
        head(0xdd, n_items, 4);
    }
}

void MsgpackWriter::str(std::string_view text) {
    const size_t n = text.size();
    if (n < 32) {
        head(uint8_t(0xa0 | n), 0, 0);
    } else if (n <= 0xff) {
        head(0xd9, n, 1);
    } else if (n <= 0xffff) {
        head(0xda, n, 2);
    } else {
        overflowed_ = true;  // no text of the protocol is that long
        return;
    }
    raw(text.data(), n);
}

void MsgpackWriter::number(uint64_t value) {
    if (value < 0x80) {
        head(uint8_t(value), 0, 0);
    } else if (value <= 0xff) {
        head(0xcc, value, 1);
    } else if (value <= 0xffff) {
        head(0xcd, value, 2);
    } else if (value <= 0xffffffffu) {
        head(0xce, value, 4);
    } else {
        head(0xcf, value, 8);
    }
}

void MsgpackWriter::boolean(bool value) { head(value ? 0xc3 : 0xc2, 0, 0); }

void MsgpackWriter::bin_header(size_t n_bytes) {
    if (n_bytes <= 0xff) {
        head(0xc4, n_bytes, 1);
    } else if (n_bytes <= 0xffff) {
        head(0xc5, n_bytes, 2);
    } else if (n_bytes <= 0xffffffffu) {
        head(0xc6, n_bytes, 4);
    } else {
        overflowed_ = true;
    }
}

bool MsgpackReader::span(size_t n_bytes, const uint8_t *& begin) {
    if (n_bytes > left()) {
        return false;
    }
    begin = at_;
    at_ += n_bytes;
    return true;
}

bool MsgpackReader::big_endian(unsigned n_bytes, uint64_t & value) {
    const uint8_t * bytes;
    if (!span(n_bytes, bytes)) {
        return false;
    }
    value = 0;
    for (unsigned i = 0; i < n_bytes; i++) {
        value = value << 8 | bytes[i];
    }
    return true;
}

bool MsgpackReader::map(uint32_t & n_pairs) {
    const uint8_t * type;
    uint64_t        n;
    if (!span(1, type)) {
        return false;
    }
    if ((*type & 0xf0) == 0x80) {
        n = *type & 0x0f;
    } else if ((*type != 0xde && *type != 0xdf) || !big_endian(*type == 0xde ? 2 : 4, n)) {
        return false;
    }
    n_pairs = uint32_t(n);
    return n <= left() / 2;  // a key and a value take a byte each at least
}

bool MsgpackReader::array(uint32_t & n_items) {
    const uint8_t * type;
    uint64_t        n;
    if (!span(1, type)) {
        return false;
    }
    if ((*type & 0xf0) == 0x90) {
        n = *type & 0x0f;
    } else if ((*type != 0xdc && *type != 0xdd) || !big_endian(*type == 0xdc ? 2 : 4, n)) {
        return false;
    }
    n_items = uint32_t(n);
    return n <= left();
}

bool MsgpackReader::str(std::string_view & text) {
    const uint8_t * type;
    const uint8_t * begin;
    uint64_t        n;
    if (!span(1, type)) {
        return false;
    }
    if ((*type & 0xe0) == 0xa0) {
        n = *type & 0x1f;
    } else if (*type < 0xd9 || *type > 0xdb || !big_endian(1u << (*type - 0xd9), n)) {
        return false;
    }
    if (!span(size_t(n), begin)) {
        return false;
    }
    text = {reinterpret_cast<const char *>(begin), size_t(n)};
    return true;
}

bool MsgpackReader::bin(Bytes & bytes) {
    const uint8_t * type;
    uint64_t        n;
    if (!span(1, type) || *type < 0xc4 || *type > 0xc6 || !big_endian(1u << (*type - 0xc4), n)) {
        return false;
    }
    bytes.size = size_t(n);
    return span(bytes.size, bytes.data);
}

bool MsgpackReader::number(uint64_t & value) {
    if (left() > 0 && *at_ >= 0xcc && *at_ <= 0xcf) {
        const unsigned n_bytes = 1u << (*at_ - 0xcc);
        at_++;
        return big_endian(n_bytes, value);
    }
    int64_t signed_value;
    if (!integer(signed_value) || signed_value < 0) {
        return false;
    }
    value = uint64_t(signed_value);
    return true;
}

bool MsgpackReader::integer(int64_t & value) {
    const uint8_t * type;
    uint64_t        bits;
    if (!span(1, type)) {
        return false;
    }
    if (*type < 0x80 || *type >= 0xe0) {
        value = int8_t(*type);
        return true;
    }
    if (*type >= 0xcc && *type <= 0xcf) {
        if (!big_endian(1u << (*type - 0xcc), bits) || bits > uint64_t(INT64_MAX)) {
            return false;
        }
        value = int64_t(bits);
        return true;
    }
    if (*type < 0xd0 || *type > 0xd3) {
        return false;
    }
    const unsigned n_bytes = 1u << (*type - 0xd0);
    if (!big_endian(n_bytes, bits)) {
        return false;
    }
    switch (n_bytes) {
        case 1: value = int8_t(bits); break;
        case 2: value = int16_t(bits); break;
        case 4: value = int32_t(bits); break;
        default: value = int64_t(bits); break;
    }
    return true;
}

bool MsgpackReader::boolean(bool & value) {
    const uint8_t * type;
    if (!span(1, type) || (*type != 0xc2 && *type != 0xc3)) {
        return false;
    }
    value = *type == 0xc3;
    return true;
}

bool MsgpackReader::skip(int depth) {
    if (left() == 0) {
        return false;
    }
    const uint8_t type = *at_;
    if ((type & 0xf0) == 0x80 || type == 0xde || type == 0xdf || (type & 0xf0) == 0x90 || type == 0xdc ||
        type == 0xdd) {
        const bool is_map = (type & 0xf0) == 0x80 || type == 0xde || type == 0xdf;
        uint32_t   n      = 0;
        if (depth >= max_depth || !(is_map ? map(n) : array(n))) {
            return false;
        }
        for (uint32_t i = 0; i < n; i++) {
            std::string_view key;
            if ((is_map && !str(key)) || !skip(depth + 1)) {
                return false;
            }
        }
        return true;
    }
    if ((type & 0xe0) == 0xa0 || (type >= 0xd9 && type <= 0xdb)) {
        std::string_view text;
        return str(text);
    }
    if (type >= 0xc4 && type <= 0xc6) {
        Bytes bytes;
        return bin(bytes);
    }
    if (type == 0xc0 || type == 0xc2 || type == 0xc3) {
        at_++;
        return true;
    }
    if (type == 0xca || type == 0xcb) {
        const uint8_t * begin;
        return span(type == 0xca ? 5 : 9, begin);
    }
    if (type >= 0xcc && type <= 0xcf) {
        uint64_t value;
        return number(value);
    }
    int64_t value;
    return integer(value);
}

}  // namespace swarm
