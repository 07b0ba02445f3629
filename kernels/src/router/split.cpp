#include "router/split.hpp"

#include <algorithm>

namespace swarm {

namespace {

bool refuse(Failure & failure, int layer, int expert, const std::string & reason) {
    failure              = Failure();
    failure.layer        = layer;
    failure.first_expert = failure.last_expert = expert;
    failure.reason       = reason;
    return false;
}

}  // namespace

Job & LayerSplit::new_job(int32_t slice, int node) {
    if (n_jobs_ == jobs_.size()) {
        jobs_.emplace_back();
    }
    Job & job = jobs_[n_jobs_++];
    job.table = table_;
    job.slices.clear();
    job.nodes      = &table_->slices()[size_t(slice)].nodes;
    job.is_uniform = true;
    job.state      = Job::State::waiting;
    job.node       = node;
    job.peer       = nullptr;
    job.y          = {};
    job.clear_pairs();
    job.tried.clear();
    job.hurried.clear();
    job.is_hurried = false;
    job.given_up.clear();
    job.problem.clear();
    job.begun        = {};
    job.first_expert = table_->slices()[size_t(slice)].first;
    job.last_expert  = table_->slices()[size_t(slice)].last;
    return job;
}

// For pairs of a job that had trouble: nobody is given their time twice.
Job & LayerSplit::new_job_from(const Job & former, int32_t slice, int node) {
    Job & job    = new_job(slice, node);
    job.order    = slice;
    job.peer     = former.peer;
    job.tried    = former.tried;
    job.hurried  = former.hurried;
    job.given_up = former.given_up;
    job.begun    = former.begun;
    job.deadline = former.deadline;
    job.problem  = former.problem;
    return job;
}

int LayerSplit::slot_of(int token, int32_t expert) const {
    const int32_t * ids = input_->ids + size_t(token) * input_->ids_token_stride;
    return int(std::find(ids, ids + input_->n_used, expert) - ids);
}

// Slices are sorted by layer and expert: those of this layer are neighbours.
void LayerSplit::forget_slices() {
    const auto & slices = table_->slices();
    job_of_slice_.resize(slices.size());
    job_of_node_.resize(table_->nodes().size());
    for (size_t i = size_t(table_->slice_of(input_->layer, 0)); i < slices.size() && slices[i].layer == input_->layer;
         i++) {
        job_of_slice_[i] = -1;
        for (const int node : slices[i].nodes) {
            job_of_node_[size_t(node)] = -1;
        }
    }
}

void LayerSplit::add_slice(size_t index, int32_t slice) {
    const RoutingTable::Slice & entry = table_->slices()[size_t(slice)];
    Job &                       job   = jobs_[index];
    job.slices.push_back(slice);
    job.is_uniform   = job.is_uniform && entry.nodes == *job.nodes;
    job.first_expert = std::min(job.first_expert, entry.first);
    job.last_expert  = std::max(job.last_expert, entry.last);
    job_of_slice_[size_t(slice)] = int32_t(index);
}

void LayerSplit::append(size_t index, int token, int slot, int32_t expert) {
    Job &         job = jobs_[index];
    const float * h   = input_->h + size_t(token) * input_->h_token_stride;
    if (job.token.empty() || job.token.back() != token) {
        job.token.push_back(token);
        if (!input_->input_pair) {
            job.h.push_back(h);
        }
    }
    if (input_->input_pair) {
        job.h.push_back(h + size_t(slot) * input_->h_slot_stride);
    }
    places_[size_t(token) * size_t(input_->n_used) + size_t(slot)] = {int32_t(index), int32_t(job.expert.size())};
    job.row.push_back(int32_t(job.token.size() - 1));
    job.expert.push_back(expert);
    if (input_->uses_weight) {
        job.weight.push_back(
            input_->weights[size_t(token) * input_->weights_token_stride + size_t(slot) * input_->weights_slot_stride]);
    }
}

bool LayerSplit::build(const LayerInput & input, const RoutingTable & table, const PeerSet & peers, Failure & failure) {
    input_  = &input;
    table_  = &table;
    n_jobs_ = 0;
    const int layer = input.layer;
    if (layer < 0 || input.n_tokens < 0 || input.n_used < 1 || input.n_in < 1 || input.n_out < 1 ||
        int64_t(input.n_tokens) * input.n_used > INT32_MAX) {
        return refuse(failure, layer, -1,
                      "the layer's sizes make no sense: " + std::to_string(input.n_tokens) + " tokens, " +
                          std::to_string(input.n_used) + " experts used, " + std::to_string(input.n_in) +
                          " values in, " + std::to_string(input.n_out) + " out");
    }
    const std::string missing = table.missing(layer);
    if (!missing.empty()) {
        return refuse(failure, layer, -1, missing);
    }
    const int n_expert = table.n_expert(layer);
    last_token_of_expert_.assign(size_t(n_expert), -1);
    places_.resize(size_t(input.n_tokens) * size_t(input.n_used));

    forget_slices();
    const Clock::time_point now    = Clock::now();
    const auto &            slices = table.slices();
    const size_t            begin  = size_t(table.slice_of(layer, 0));
    const size_t            end    = size_t(table.slice_of(layer, n_expert - 1)) + 1;

    for (int token = 0; token < input.n_tokens; token++) {
        for (int slot = 0; slot < input.n_used; slot++) {
            const int32_t expert = input.ids[size_t(token) * input.ids_token_stride + size_t(slot)];
            if (expert < 0 || expert >= n_expert) {
                return refuse(failure, layer, expert,
                              "the router chose expert " + std::to_string(expert) + " for token " +
                                  std::to_string(token) + ", but the routing table holds experts 0 to " +
                                  std::to_string(n_expert - 1));
            }
            if (last_token_of_expert_[size_t(expert)] == token) {
                return refuse(failure, layer, expert,
                              "the router chose expert " + std::to_string(expert) + " twice for token " +
                                  std::to_string(token));
            }
            last_token_of_expert_[size_t(expert)] = token;

            const int32_t slice = table.slice_of(layer, expert);
            if (job_of_slice_[size_t(slice)] < 0) {
                const int node = peers.preferred(slices[size_t(slice)], now);
                if (job_of_node_[size_t(node)] < 0) {
                    job_of_node_[size_t(node)] = int32_t(n_jobs_);
                    // Place of this node's partial sums: by its first slice in the layer, whether used now or not, so
                    // that a token's sum does not depend on the other tokens of the batch.
                    size_t first = begin;
                    while (first < end && slices[first].nodes.front() != node) {
                        first++;
                    }
                    new_job(slice, node).order = int(first < end ? first : size_t(slice));
                }
                add_slice(size_t(job_of_node_[size_t(node)]), slice);
            }
            append(size_t(job_of_slice_[size_t(slice)]), token, slot, expert);
        }
    }
    return true;
}

void LayerSplit::separate(size_t index) {
    const std::vector<int32_t> slices = jobs_[index].slices;
    const Job                  former = jobs_[index];
    const size_t               first_new = n_jobs_;
    Job &                      job = jobs_[index];
    job.slices.clear();
    job.first_expert = table_->slices()[size_t(slices.front())].first;
    job.last_expert  = table_->slices()[size_t(slices.front())].last;
    job.is_uniform   = true;
    job.clear_pairs();
    for (const int32_t slice : slices) {
        const std::vector<int> & nodes = table_->slices()[size_t(slice)].nodes;
        size_t                   home  = index;
        for (home = first_new; home < n_jobs_ && *jobs_[home].nodes != nodes; home++) {
        }
        if (nodes == *jobs_[index].nodes) {
            home = index;
        } else if (home == n_jobs_) {
            new_job_from(former, slice, former.node);
        }
        add_slice(home, slice);
    }
    for (size_t i = 0; i < former.n_pairs(); i++) {
        const int token = former.token[size_t(former.row[i])];
        append(size_t(job_of_slice_[size_t(table_->slice_of(input_->layer, former.expert[i]))]), token,
               slot_of(token, former.expert[i]), former.expert[i]);
    }
}

void LayerSplit::follow(const RoutingTable & table) { table_ = &table; }

void LayerSplit::replan(size_t index, const PeerSet & peers, Clock::time_point now) {
    const Job former = jobs_[index];
    jobs_[index].clear_pairs();
    jobs_[index].slices.clear();
    jobs_[index].state = Job::State::done;
    forget_slices();
    for (size_t i = 0; i < former.n_pairs(); i++) {
        const int32_t expert = former.expert[i];
        const int32_t slice  = table_->slice_of(input_->layer, expert);
        if (job_of_slice_[size_t(slice)] < 0) {
            const int node = peers.preferred(table_->slices()[size_t(slice)], now, former.given_up);
            if (job_of_node_[size_t(node)] < 0) {
                job_of_node_[size_t(node)] = int32_t(n_jobs_);
                new_job_from(former, slice, node);
            }
            add_slice(size_t(job_of_node_[size_t(node)]), slice);
        }
        const int token = former.token[size_t(former.row[i])];
        append(size_t(job_of_slice_[size_t(slice)]), token, slot_of(token, expert), expert);
    }
}

bool LayerSplit::combine(float * out, Failure & failure) {
    return table_->reduce == Reduce::rows ? combine_rows(out, failure) : combine_sums(out, failure);
}

bool LayerSplit::combine_rows(float * out, Failure & failure) {
    const size_t n_out     = size_t(input_->n_out);
    const size_t row_bytes = n_out * dtype_bytes(table_->dtype);
    for (int token = 0; token < input_->n_tokens; token++) {
        float * const target = out + size_t(token) * n_out;
        for (int slot = 0; slot < input_->n_used; slot++) {
            const Place     place = places_[size_t(token) * size_t(input_->n_used) + size_t(slot)];
            const Job &     job   = jobs_[size_t(place.job)];
            const uint8_t * row   = job.y.data + size_t(place.pair) * row_bytes;
            if (!(slot == 0 ? decode_floats : accumulate_floats)(table_->dtype, row, n_out, target)) {
                const int expert = job.expert[size_t(place.pair)];
                refuse(failure, input_->layer, expert, "the reply holds a value that is not finite");
                failure.node = job.peer->node.name;
                return false;
            }
        }
    }
    return true;
}

bool LayerSplit::combine_sums(float * out, Failure & failure) {
    const size_t n_out     = size_t(input_->n_out);
    const size_t row_bytes = n_out * dtype_bytes(table_->dtype);
    sequence_.clear();
    for (size_t i = 0; i < n_jobs_; i++) {
        sequence_.push_back(uint32_t(i));
    }
    std::sort(sequence_.begin(), sequence_.end(), [this](uint32_t a, uint32_t b) {
        return jobs_[a].order != jobs_[b].order ? jobs_[a].order < jobs_[b].order
                                                : a < b;  // orders of two tables may be equal
    });
    is_written_.assign(size_t(input_->n_tokens), 0);
    for (const uint32_t index : sequence_) {
        const Job & job = jobs_[index];
        for (size_t row = 0; row < job.n_rows(); row++) {
            const size_t token = size_t(job.token[row]);
            if (!(is_written_[token] ? accumulate_floats : decode_floats)(table_->dtype, job.y.data + row * row_bytes,
                                                                          n_out, out + token * n_out)) {
                refuse(failure, input_->layer, job.first_expert, "the reply holds a value that is not finite");
                failure.last_expert = job.last_expert;
                failure.node        = job.peer->node.name;
                return false;
            }
            is_written_[token] = 1;
        }
    }
    return true;
}

}  // namespace swarm
