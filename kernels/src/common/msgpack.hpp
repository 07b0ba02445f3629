#pragma once
// The part of msgpack that the expert call uses, without allocation.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace swarm {

struct Bytes {
    const uint8_t * data = nullptr;
    size_t          size = 0;
};

// dst[i] = src[i] ^ mask byte (i mod 4); the mask's first byte is its lowest one.
void masked_copy(uint8_t * dst, const uint8_t * src, size_t n, uint32_t mask);

// Writes values in their shortest form into a buffer of fixed capacity. Every byte is XORed with a 4-byte mask
// on its way (a WebSocket client must mask), so that masking costs no pass of its own; mask 0 writes plain msgpack.
class MsgpackWriter {
  public:
    MsgpackWriter(uint8_t * begin, size_t capacity, uint32_t mask = 0)
        : begin_(begin), at_(begin), end_(begin + capacity), mask_(mask) {}

    void map(uint32_t n_pairs);
    void array(uint32_t n_items);
    void str(std::string_view text);
    void number(uint64_t value);
    void boolean(bool value);
    void bin_header(size_t n_bytes);         // n_bytes of raw() must follow
    void raw(const void * data, size_t n_bytes);

    size_t size() const { return size_t(at_ - begin_); }
    bool   overflowed() const { return overflowed_; }  // something did not fit; what was written is useless

  private:
    void head(uint8_t type, uint64_t value, unsigned n_bytes);

    uint8_t * begin_;
    uint8_t * at_;
    uint8_t * end_;
    uint32_t  mask_;
    bool      overflowed_ = false;
};

// Reads values from a buffer. Each function says false when the next value is of another type, or does not lie in
// the buffer as a whole; the reader is of no use after that.
class MsgpackReader {
  public:
    static constexpr int max_depth = 8;

    MsgpackReader(const uint8_t * data, size_t size) : at_(data), end_(data + size) {}

    bool map(uint32_t & n_pairs);
    bool array(uint32_t & n_items);
    bool str(std::string_view & text);
    bool bin(Bytes & bytes);
    bool number(uint64_t & value);           // any integer format, value ≥ 0
    bool integer(int64_t & value);
    bool boolean(bool & value);
    bool skip(int depth = 0);                // one value of any known type at nesting `depth`
    bool at_end() const { return at_ == end_; }

  private:
    size_t left() const { return size_t(end_ - at_); }
    bool   big_endian(unsigned n_bytes, uint64_t & value);
    bool   span(size_t n_bytes, const uint8_t *& begin);

    const uint8_t * at_;
    const uint8_t * end_;
};

}  // namespace swarm
