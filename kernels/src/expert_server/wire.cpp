#include "expert_server/wire.hpp"

namespace swarm {

namespace {

constexpr uint64_t version = 1;

enum : unsigned {
    has_v        = 1,
    has_id       = 2,
    has_model    = 4,
    has_program  = 8,
    has_term     = 16,
    has_layer    = 32,
    has_reduce   = 64,
    has_rows     = 128,
    has_dtype    = 256,
    has_h        = 512,
    has_row      = 1024,
    has_expert   = 2048,
    has_weight   = 4096,
    has_deadline = 8192
};
constexpr unsigned has_all = has_v | has_id | has_model | has_program | has_term | has_layer | has_reduce | has_rows |
                             has_dtype | has_h | has_row | has_expert | has_deadline;

// The field's bit, 0 when it is unknown or its value malformed.
unsigned read_field(std::string_view key, MsgpackReader & reader, CallMessage & call) {
    std::string_view text;
    uint64_t         number = 0;
    const auto       when = [](bool ok, unsigned bit) { return ok ? bit : 0u; };
    if (key == "v") {
        return when(reader.number(number) && number == version, has_v);
    }
    if (key == "id") {
        return when(reader.number(call.id), has_id);
    }
    if (key == "model") {
        return when(reader.str(call.model), has_model);
    }
    if (key == "program") {
        return when(reader.number(call.program), has_program);
    }
    if (key == "term") {
        return when(reader.number(call.term), has_term);
    }
    if (key == "layer") {
        return when(reader.number(call.layer), has_layer);
    }
    if (key == "reduce") {
        const bool ok = reader.str(text) && (text == "rows" || text == "sum");
        call.reduce   = text == "sum" ? Reduce::sum : Reduce::rows;
        return when(ok, has_reduce);
    }
    if (key == "rows") {
        return when(reader.number(call.n_rows), has_rows);
    }
    if (key == "dtype") {
        return when(reader.str(text) && parse_dtype(text, call.dtype), has_dtype);
    }
    if (key == "h") {
        return when(reader.bin(call.h), has_h);
    }
    if (key == "row") {
        return when(reader.bin(call.row), has_row);
    }
    if (key == "expert") {
        return when(reader.bin(call.expert), has_expert);
    }
    if (key == "weight") {
        return when(reader.bin(call.weight), has_weight);
    }
    if (key == "deadline_ms") {
        return when(reader.number(call.deadline_ms), has_deadline);
    }
    return 0;
}

}  // namespace

bool decode_call(const uint8_t * data, size_t size, CallMessage & call) {
    call = CallMessage();
    MsgpackReader reader(data, size);
    uint32_t      n_fields;
    if (!reader.map(n_fields)) {
        return false;
    }
    unsigned seen = 0;
    for (uint32_t i = 0; i < n_fields; i++) {
        std::string_view key;
        if (!reader.str(key)) {
            return false;
        }
        const unsigned field = read_field(key, reader, call);
        if (field == 0 || (seen & field)) {
            return false;
        }
        seen |= field;
    }
    call.has_weight = (seen & has_weight) != 0;
    return reader.at_end() && (seen & has_all) == has_all;
}

size_t write_reply_head(uint64_t id, size_t y_bytes, uint8_t * to) {
    MsgpackWriter writer(to, reply_part_max);
    writer.map(5);
    writer.str("v");
    writer.number(version);
    writer.str("id");
    writer.number(id);
    writer.str("y");
    writer.bin_header(y_bytes);
    return writer.size();
}

size_t write_reply_tail(uint64_t compute_us, uint64_t queue_us, uint8_t * to) {
    MsgpackWriter writer(to, reply_part_max);
    writer.str("compute_us");
    writer.number(compute_us);
    writer.str("queue_us");
    writer.number(queue_us);
    return writer.size();
}

}  // namespace swarm
