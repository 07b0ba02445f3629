#include "router/routing.hpp"

#include "common/net.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <unordered_set>

namespace swarm {

namespace {

using json = nlohmann::json;

struct Invalid {
    std::string problem;
};

const json & field(const json & object, const char * name, const std::string & where) {
    const auto found = object.is_object() ? object.find(name) : object.end();
    if (found == object.end()) {
        throw Invalid{where + " has no \"" + name + "\""};
    }
    return *found;
}

uint64_t number(const json & object, const char * name, uint64_t lowest, uint64_t highest, const std::string & where) {
    const json & value = field(object, name, where);
    if (!value.is_number_unsigned() || value.get<uint64_t>() < lowest || value.get<uint64_t>() > highest) {
        throw Invalid{where + ": \"" + name + "\" is not a whole number from " + std::to_string(lowest) + " to " +
                      std::to_string(highest)};
    }
    return value.get<uint64_t>();
}

std::string text(const json & object, const char * name, const std::string & where) {
    const json & value = field(object, name, where);
    if (!value.is_string()) {
        throw Invalid{where + ": \"" + name + "\" is not a text"};
    }
    return value.get<std::string>();
}

const json & list(const json & object, const char * name, size_t longest, const std::string & where) {
    const json & value = field(object, name, where);
    if (!value.is_array() || value.size() > longest) {
        throw Invalid{where + ": \"" + name + "\" is not a list of at most " + std::to_string(longest)};
    }
    return value;
}

std::string experts_text(int first, int last) {
    return first == last ? "expert " + std::to_string(first)
                         : "experts " + std::to_string(first) + " to " + std::to_string(last);
}

RoutingTable::Node parse_node(const json & item, const std::string & where) {
    RoutingTable::Node node;
    node.name = text(item, "name", where);
    node.host = text(item, "host", where);
    node.port = uint16_t(number(item, "port", 1, 65535, where));
    if (node.name.empty() || node.name.size() > 255) {
        throw Invalid{where + ": the name is empty or longer than 255 bytes"};
    }
    Address     address;
    std::string problem;
    if (!parse_address(node.host, node.port, address, problem)) {
        throw Invalid{where + " (" + node.name + "): " + problem};
    }
    return node;
}

RoutingTable::Slice parse_slice(const json & item, const std::string & position, size_t n_nodes) {
    RoutingTable::Slice slice;
    slice.layer = int(number(item, "layer", 0, RoutingTable::max_layers - 1, position));
    const std::string layer = "layer " + std::to_string(slice.layer);
    slice.first = int(number(item, "first", 0, RoutingTable::max_experts - 1, position + " (" + layer + ")"));
    slice.last  = int(number(item, "last", 0, RoutingTable::max_experts - 1, position + " (" + layer + ")"));
    const std::string where = layer + ", " + experts_text(slice.first, slice.last);
    if (slice.first > slice.last) {
        throw Invalid{where + ": the first expert is behind the last"};
    }
    const json & nodes = list(item, "nodes", 64, where);
    if (nodes.empty()) {
        throw Invalid{where + ": no node holds them"};
    }
    for (const json & index : nodes) {
        if (!index.is_number_unsigned() || index.get<uint64_t>() >= n_nodes) {
            throw Invalid{where + ": a node index is not in the table, which has " + std::to_string(n_nodes) +
                          " nodes"};
        }
        const int node = int(index.get<uint64_t>());
        if (std::find(slice.nodes.begin(), slice.nodes.end(), node) != slice.nodes.end()) {
            throw Invalid{where + ": node " + std::to_string(node) + " stands there twice"};
        }
        slice.nodes.push_back(node);
    }
    return slice;
}

}  // namespace

std::shared_ptr<const RoutingTable> RoutingTable::parse(std::string_view source, std::string & problem) {
    const json root = json::parse(source.begin(), source.end(), nullptr, false);
    try {
        const std::string where = "the routing table";
        if (!root.is_object()) {
            throw Invalid{where + " is not a JSON object"};
        }
        const json & version = field(root, "version", where);
        if (version != 1) {
            throw Invalid{where + " has version " +
                          version.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 32) +
                          ", this router speaks version 1"};
        }
        const auto table         = std::make_shared<RoutingTable>();
        table->sequence          = number(root, "sequence", 0, UINT64_MAX, where);
        table->term              = number(root, "term", 0, UINT64_MAX, where);
        table->deadline_floor_ms = number(root, "deadline_floor_ms", 1, 3600 * 1000, where);
        table->model             = text(root, "model", where);
        const bool model_ok      = std::all_of(table->model.begin(), table->model.end(), [](char c) {
            return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '-';
        });
        if (table->model.empty() || table->model.size() > 64 || !model_ok) {
            throw Invalid{where + ": \"model\" is not 1 to 64 of the characters 0-9, a-z and -"};
        }
        if (!parse_reduce(text(root, "reduce", where), table->reduce)) {
            throw Invalid{where + ": \"reduce\" is neither rows nor sum"};
        }
        if (!parse_dtype(text(root, "dtype", where), table->dtype)) {
            throw Invalid{where + ": \"dtype\" is none of f32, bf16, f16"};
        }

        std::unordered_set<std::string> names;
        for (const json & item : list(root, "nodes", 4096, where)) {
            table->nodes_.push_back(
                parse_node(item, "node " + std::to_string(table->nodes_.size()) + " of the routing table"));
            if (!names.insert(table->nodes_.back().name).second) {
                throw Invalid{where + " has two nodes of the name \"" + table->nodes_.back().name + "\""};
            }
        }
        for (const json & item : list(root, "slices", size_t(1) << 20, where)) {
            table->slices_.push_back(
                parse_slice(item, "slice " + std::to_string(table->slices_.size()) + " of the routing table",
                            table->nodes_.size()));
        }
        std::sort(table->slices_.begin(), table->slices_.end(), [](const Slice & a, const Slice & b) {
            return a.layer != b.layer ? a.layer < b.layer : a.first < b.first;
        });
        for (size_t i = 0; i < table->slices_.size(); i++) {
            const Slice & slice = table->slices_[i];
            if (size_t(slice.layer) >= table->layers_.size()) {
                table->layers_.resize(size_t(slice.layer) + 1);
            }
            Layer &   layer = table->layers_[size_t(slice.layer)];
            const int n     = int(layer.slice_of_expert.size());
            if (slice.first < n) {
                throw Invalid{"layer " + std::to_string(slice.layer) + ", " +
                              experts_text(slice.first, std::min(n - 1, slice.last)) +
                              ": in more than one slice of the routing table"};
            }
            layer.is_covered = (n == 0 || layer.is_covered) && slice.first == n;
            layer.slice_of_expert.resize(size_t(slice.last) + 1, -1);
            std::fill(layer.slice_of_expert.begin() + slice.first, layer.slice_of_expert.end(), int32_t(i));
        }
        return table;
    } catch (const Invalid & invalid) {
        problem = invalid.problem;
    } catch (const json::exception & error) {  // none is expected: every access above is checked first
        problem = std::string("the routing table: ") + error.what();
    }
    return nullptr;
}

std::shared_ptr<const RoutingTable> RoutingTable::read(const std::string & path, std::string & problem) {
    std::ifstream file(path, std::ios::binary);
    const std::string source((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file) {
        problem = "cannot read the routing table " + path;
        return nullptr;
    }
    const auto table = parse(source, problem);
    if (!table) {
        problem = path + ": " + problem;
    }
    return table;
}

int RoutingTable::n_expert(int layer) const {
    return layer < 0 || size_t(layer) >= layers_.size() ? 0 : int(layers_[size_t(layer)].slice_of_expert.size());
}

std::string RoutingTable::missing(int layer) const {
    const int n = n_expert(layer);
    if (n == 0) {
        return "no node holds any expert of layer " + std::to_string(layer);
    }
    const Layer & entry = layers_[size_t(layer)];
    if (entry.is_covered) {
        return std::string();
    }
    std::string ranges;
    for (int i = 0; i < n; i++) {
        if (entry.slice_of_expert[size_t(i)] >= 0) {
            continue;
        }
        const int first = i;
        while (i + 1 < n && entry.slice_of_expert[size_t(i) + 1] < 0) {
            i++;
        }
        ranges += (ranges.empty() ? "" : ", ") + experts_text(first, i);
    }
    return "no node holds " + ranges + " of layer " + std::to_string(layer);
}

}  // namespace swarm
