#pragma once
// The expert call of docs/protocol.md as the router sees it: requests out, replies in.

#include "common/floats.hpp"
#include "common/msgpack.hpp"
#include "common/reduce.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace swarm {

constexpr uint64_t protocol_version = 1;

bool             parse_reduce(std::string_view name, Reduce & reduce);
std::string_view reduce_name(Reduce reduce);

struct Request {
    uint64_t              id = 0;
    std::string_view      model;
    uint64_t              program = 0;
    uint64_t              term    = 0;
    uint32_t              layer   = 0;
    Reduce                reduce  = Reduce::rows;
    Dtype                 dtype   = Dtype::f32;
    uint32_t              n_rows  = 0;
    uint32_t              n_pairs = 0;
    uint32_t              n_in    = 0;
    uint32_t              n_h     = 0;        // n_rows, or n_pairs when the program's input is `pair`
    const float * const * h       = nullptr;  // n_h pointers to n_in floats each
    const int32_t *       row     = nullptr;  // n_pairs
    const int32_t *       expert  = nullptr;  // n_pairs
    const float *         weight  = nullptr;  // n_pairs; null: the program does not use them
    uint64_t              deadline_ms = 0;
};

// No encoded request is longer than this.
size_t request_bytes_bound(const Request & request);

// False: `problem` says what cannot be encoded.
bool encode_request(const Request & request, MsgpackWriter & writer, std::string & problem);

struct Reply {
    uint64_t version    = 0;
    uint64_t id         = 0;
    bool     is_error   = false;
    Bytes    y;  // points into the message
    uint64_t compute_us = 0;
    uint64_t queue_us   = 0;
    struct {
        std::string_view kind;     // points into the message
        std::string_view message;  // points into the message
        int64_t          layer     = -1;
        uint32_t         n_experts = 0;
        int64_t          experts[16] = {};
        bool             retry       = false;
    } error;
};

// False: the message is not a reply of protocol version 1; `problem` says why. y's length is the caller's to check.
bool decode_reply(const uint8_t * data, size_t size, Reply & reply, std::string & problem);

}  // namespace swarm
