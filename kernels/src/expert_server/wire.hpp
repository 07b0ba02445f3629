#pragma once
// The expert call of docs/protocol.md as the expert server sees it: calls in, replies out.

#include "common/floats.hpp"
#include "common/msgpack.hpp"
#include "common/reduce.hpp"

#include <cstdint>
#include <string_view>

namespace swarm {

struct CallMessage {
    uint64_t         id = 0;
    std::string_view model;  // points into the message, as all binary fields do
    uint64_t         program = 0;
    uint64_t         term    = 0;
    uint64_t         layer   = 0;
    Reduce           reduce  = Reduce::rows;
    uint64_t         n_rows  = 0;
    Dtype            dtype   = Dtype::f32;
    Bytes            h, row, expert, weight;
    bool             has_weight  = false;
    uint64_t         deadline_ms = 0;
};

// True: a call of protocol version 1 as routers write it, each field there once and of its type, nothing else in it.
// Values are not judged. False says nothing about the message: node/expert_server/wire.py does, which reads every form.
bool decode_call(const uint8_t * data, size_t size, CallMessage & call);

// What stands before and behind the bytes of `y` in a reply; sizes in bytes, at most reply_part_max each.
constexpr size_t reply_part_max = 64;
size_t           write_reply_head(uint64_t id, size_t y_bytes, uint8_t * to);
size_t           write_reply_tail(uint64_t compute_us, uint64_t queue_us, uint8_t * to);

}  // namespace swarm
