#include "router/wire.hpp"

#include <algorithm>

namespace swarm {

bool parse_reduce(std::string_view name, Reduce & reduce) {
    if (name != "rows" && name != "sum") {
        return false;
    }
    reduce = name == "sum" ? Reduce::sum : Reduce::rows;
    return true;
}

std::string_view reduce_name(Reduce reduce) { return reduce == Reduce::sum ? "sum" : "rows"; }

size_t request_bytes_bound(const Request & request) {
    const size_t fields = 256;  // keys, integers, short texts and the bins' heads
    return fields + request.model.size() + size_t(request.n_h) * request.n_in * dtype_bytes(request.dtype) +
           size_t(request.n_pairs) * 12;
}

bool encode_request(const Request & request, MsgpackWriter & writer, std::string & problem) {
    writer.map(request.weight ? 14 : 13);
    writer.str("v");
    writer.number(protocol_version);
    writer.str("id");
    writer.number(request.id);
    writer.str("model");
    writer.str(request.model);
    writer.str("program");
    writer.number(request.program);
    writer.str("term");
    writer.number(request.term);
    writer.str("layer");
    writer.number(request.layer);
    writer.str("reduce");
    writer.str(reduce_name(request.reduce));
    writer.str("rows");
    writer.number(request.n_rows);
    writer.str("dtype");
    writer.str(dtype_name(request.dtype));

    writer.str("h");
    writer.bin_header(size_t(request.n_h) * request.n_in * dtype_bytes(request.dtype));
    for (uint32_t i = 0; i < request.n_h; i++) {
        if (request.dtype == Dtype::f32) {
            writer.raw(request.h[i], size_t(request.n_in) * 4);
            continue;
        }
        uint16_t converted[512];  // stays in the first-level cache between conversion and masking
        for (uint32_t done = 0; done < request.n_in;) {
            const uint32_t n = std::min<uint32_t>(request.n_in - done, 512);
            if (!encode_floats(request.dtype, request.h[i] + done, n, converted)) {
                problem = "a hidden value does not fit the wire's float format " +
                          std::string(dtype_name(request.dtype)) + "; choose bf16 or f32";
                return false;
            }
            writer.raw(converted, size_t(n) * 2);
            done += n;
        }
    }

    const size_t pair_bytes = size_t(request.n_pairs) * 4;
    writer.str("row");
    writer.bin_header(pair_bytes);
    writer.raw(request.row, pair_bytes);
    writer.str("expert");
    writer.bin_header(pair_bytes);
    writer.raw(request.expert, pair_bytes);
    if (request.weight) {
        writer.str("weight");
        writer.bin_header(pair_bytes);
        writer.raw(request.weight, pair_bytes);
    }
    writer.str("deadline_ms");
    writer.number(request.deadline_ms);
    if (writer.overflowed()) {
        problem = "the request is longer than a message can be";
        return false;
    }
    return true;
}

namespace {

bool decode_error(MsgpackReader & reader, Reply & reply) {
    uint32_t n_pairs;
    if (!reader.map(n_pairs)) {
        return false;
    }
    unsigned seen = 0;
    for (uint32_t i = 0; i < n_pairs; i++) {
        std::string_view key;
        if (!reader.str(key)) {
            return false;
        }
        unsigned field = 0;
        bool     ok    = true;
        if (key == "kind") {
            field = 1;
            ok    = reader.str(reply.error.kind);
        } else if (key == "message") {
            field = 2;
            ok    = reader.str(reply.error.message);
        } else if (key == "layer") {
            field = 4;
            ok    = reader.integer(reply.error.layer);
        } else if (key == "experts") {
            field = 8;
            ok    = reader.array(reply.error.n_experts) && reply.error.n_experts <= 16;
            for (uint32_t e = 0; ok && e < reply.error.n_experts; e++) {
                ok = reader.integer(reply.error.experts[e]);
            }
        } else if (key == "retry") {
            field = 16;
            ok    = reader.boolean(reply.error.retry);
        } else {
            ok = reader.skip(2);
        }
        if (!ok || (seen & field)) {
            return false;
        }
        seen |= field;
    }
    return (seen & 3) == 3;
}

}  // namespace

bool decode_reply(const uint8_t * data, size_t size, Reply & reply, std::string & problem) {
    reply = Reply();
    MsgpackReader reader(data, size);
    uint32_t      n_pairs;
    if (!reader.map(n_pairs)) {
        problem = "the reply is not a msgpack map";
        return false;
    }
    enum : unsigned { has_v = 1, has_id = 2, has_y = 4, has_error = 8, has_compute = 16, has_queue = 32 };
    unsigned seen = 0;
    for (uint32_t i = 0; i < n_pairs; i++) {
        std::string_view key;
        if (!reader.str(key)) {
            problem = "the reply is cut short or has a key that is no text";
            return false;
        }
        unsigned field = 0;
        bool     ok    = true;
        if (key == "v") {
            field = has_v;
            ok    = reader.number(reply.version);
        } else if (key == "id") {
            field = has_id;
            ok    = reader.number(reply.id);
        } else if (key == "y") {
            field = has_y;
            ok    = reader.bin(reply.y);
        } else if (key == "compute_us") {
            field = has_compute;
            ok    = reader.number(reply.compute_us);
        } else if (key == "queue_us") {
            field = has_queue;
            ok    = reader.number(reply.queue_us);
        } else if (key == "error") {
            field = has_error;
            ok    = decode_error(reader, reply);
        } else {
            ok = reader.skip(1);
        }
        if (!ok || (seen & field)) {
            problem = "the reply's field \"" + std::string(key.substr(0, 32)) +
                      "\" is malformed, cut short or repeated";
            return false;
        }
        seen |= field;
    }
    if (!reader.at_end()) {
        problem = "bytes follow the reply's map";
        return false;
    }
    if (!(seen & has_v) || reply.version != protocol_version) {
        problem = (seen & has_v) ? "the reply has protocol version " + std::to_string(reply.version) +
                                       ", this router speaks version " + std::to_string(protocol_version)
                                 : "the reply has no protocol version";
        return false;
    }
    if (!(seen & has_id) || !(seen & (has_y | has_error))) {
        problem = "the reply lacks \"id\" or both \"y\" and \"error\"";
        return false;
    }
    if ((seen & has_y) && (seen & has_error)) {
        problem = "the reply has both \"y\" and \"error\"";
        return false;
    }
    reply.is_error = (seen & has_error) != 0;
    return true;
}

}  // namespace swarm
