#pragma once
// The routing table of docs/protocol.md: which node computes which experts of which layer. Immutable once parsed.

#include "common/floats.hpp"
#include "router/wire.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace swarm {

class RoutingTable {
  public:
    struct Node {
        std::string name;
        std::string host;
        uint16_t    port = 0;
    };
    struct Slice {
        int              layer = 0;
        int              first = 0;  // first and last expert, both included
        int              last  = 0;
        std::vector<int> nodes;      // indexes into nodes(), in order of preference
    };
    static constexpr int max_layers  = 1024;
    static constexpr int max_experts = 8192;  // of one layer

    // Null: `problem` says what is wrong with the text, naming layer and experts where it is about them.
    static std::shared_ptr<const RoutingTable> parse(std::string_view json, std::string & problem);

    // As above, from a file.
    static std::shared_ptr<const RoutingTable> read(const std::string & path, std::string & problem);

    // The index into slices() of the slice that holds (layer, expert), -1: none.
    int slice_of(int layer, int expert) const {
        if (layer < 0 || size_t(layer) >= layers_.size()) {
            return -1;
        }
        const std::vector<int32_t> & experts = layers_[size_t(layer)].slice_of_expert;
        return expert < 0 || size_t(expert) >= experts.size() ? -1 : experts[size_t(expert)];
    }

    // Empty: every expert from 0 to the layer's last one is held. Otherwise what is missing, as a sentence.
    std::string missing(int layer) const;

    // Experts of the layer, as far as the table knows: the last held one plus 1; 0 for a layer it does not name.
    int n_expert(int layer) const;

    // Whether this table takes the place of `other`: its (term, sequence) is higher.
    bool newer_than(const RoutingTable & other) const {
        return term != other.term ? term > other.term : sequence > other.sequence;
    }

    // Sorted by (layer, first).
    const std::vector<Slice> & slices() const { return slices_; }
    const std::vector<Node> &  nodes() const { return nodes_; }

    uint64_t    sequence = 0;
    uint64_t    term     = 0;
    std::string model;
    Reduce      reduce            = Reduce::rows;
    Dtype       dtype             = Dtype::f32;
    uint64_t    deadline_floor_ms = 2000;

  private:
    struct Layer {
        std::vector<int32_t> slice_of_expert;
        bool                 is_covered = false;
    };
    std::vector<Node>  nodes_;
    std::vector<Slice> slices_;
    std::vector<Layer> layers_;
};

}  // namespace swarm
