#include "router/exchange.hpp"

#include "router/wire.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>

namespace swarm {

namespace {

constexpr size_t error_bytes      = 4096;  // room in a reply besides y: keys, counters, or an error's message
constexpr size_t max_text_bytes   = 400;   // of what a node says about itself

// Text from the network, made fit for logs.
std::string printable(std::string_view text) {
    std::string result(text.substr(0, max_text_bytes));
    for (char & c : result) {
        c = (c >= ' ' && c <= '~') ? c : '?';
    }
    return result;
}

std::string ms_text(double ms) { return std::to_string(std::llround(ms)) + " ms"; }

bool contains(const std::vector<const Peer *> & list, const Peer * peer) {
    return std::find(list.begin(), list.end(), peer) != list.end();
}

// Whether the parts of a layer that were computed by one table go together with those computed by the other.
bool fits(const RoutingTable & newer, const RoutingTable & table, int layer) {
    return newer.model == table.model && newer.reduce == table.reduce && newer.dtype == table.dtype &&
           newer.n_expert(layer) == table.n_expert(layer) && newer.missing(layer).empty();
}

}  // namespace

size_t Exchange::reply_bytes(const Job & job) const {
    return (job.table->reduce == Reduce::rows ? job.n_pairs() : job.n_rows()) * size_t(input_->n_out) *
           dtype_bytes(job.table->dtype);
}

bool Exchange::run(const LayerInput & input, std::shared_ptr<const RoutingTable> & table, LayerSplit & split,
                   Round & round, Failure & failure) {
    input_   = &input;
    table_   = &table;
    split_   = &split;
    round_   = &round;
    failure_ = &failure;
    former_tables_.clear();
    Clock::time_point now = Clock::now();
    for (size_t i = 0; i < split.n_jobs(); i++) {
        begin(split.job(i), split.job(i).node, now);
    }
    for (;;) {
        bool all_done = true;
        for (size_t i = 0; i < split.n_jobs(); i++) {  // jobs may be appended meanwhile
            if (split.job(i).state != Job::State::done) {
                if (!advance(i, now)) {
                    peers_.abandon_calls();
                    return false;
                }
                all_done = all_done && split.job(i).state == Job::State::done;
            }
        }
        if (all_done) {
            return true;
        }
        const Clock::time_point waiting_from = Clock::now();
        if (!wait(waiting_from)) {
            peers_.abandon_calls();
            return false;
        }
        now = Clock::now();
        round.asked = round.asked == Clock::time_point{} ? waiting_from : round.asked;
        round.waited += now - waiting_from;
        round.replied = now;
    }
}

void Exchange::begin(Job & job, int node, Clock::time_point now) {
    job.node  = node;
    job.peer  = &peers_.at(node);
    job.state = Job::State::waiting;
    if (job.begun == Clock::time_point{}) {
        job.begun = now;
    }
    const auto is_new = [&](const Peer * peer) {
        return !contains(job.tried, peer) && !contains(job.given_up, peer) && !contains(job.hurried, peer);
    };
    job.is_hurried = is_new(job.peer) && std::all_of(job.slices.begin(), job.slices.end(), [&](int32_t slice) {
        const std::vector<int> & nodes = job.table->slices()[size_t(slice)].nodes;
        return std::any_of(nodes.begin(), nodes.end(),
                           [&](int other) { return other != node && is_new(&peers_.at(other)); });
    });
    if (job.is_hurried) {  // it gets all its time when every other one has had some
        job.hurried.push_back(job.peer);
        job.deadline = after_ms(now, job.peer->patience_ms(job.n_pairs(), double(job.table->deadline_floor_ms)));
    } else if (!contains(job.tried, job.peer)) {  // each node gets its own time once; further attempts share it
        job.tried.push_back(job.peer);
        job.deadline = after_ms(now, job.peer->deadline_ms(job.n_pairs(), double(job.table->deadline_floor_ms)));
    }
}

void Exchange::connect(Job & job) {
    Peer & peer = *job.peer;
    peer.asking = &job;
    job.state   = Job::State::connecting;
    if (peer.holder) {
        const Bytes y = peer.holder->y;
        peer.holder->kept_reply.assign(y.data, y.data + y.size);
        peer.holder->y = {peer.holder->kept_reply.data(), y.size};
        peer.holder    = nullptr;
        peer.socket.release_message();
    }
    if (peer.socket.state() == WebSocket::State::open) {
        // Learn what happened while the connection was idle: a server that went away is not to be asked.
        peer.socket.on_readable();
        if (peer.socket.has_message()) {
            peer.socket.close("a message came that nobody asked for");
        }
    }
    if (peer.socket.state() == WebSocket::State::closed) {
        peer.socket.start_connect(peer.address, "/v1/ffn");
    }
}

bool Exchange::advance(size_t index, Clock::time_point now) {
    Job &  job  = split_->job(index);
    Peer & peer = *job.peer;
    if (job.state == Job::State::waiting && !job.problem.empty() && is_of_former_table(job)) {
        return replan(index, now);
    }
    if (job.state == Job::State::waiting && !peer.asking && now >= peer.next_attempt && now < job.deadline) {
        connect(job);
    }
    if (job.state == Job::State::connecting && peer.socket.state() == WebSocket::State::open && !ask(job, now)) {
        return false;
    }
    if (job.state == Job::State::asked && peer.socket.has_message()) {
        return take_reply(index, now);
    }
    if (job.state != Job::State::waiting && peer.socket.state() == WebSocket::State::closed) {
        return broken(index, peer.socket.reason(), now);
    }
    return now < job.deadline || late(index, now);
}

bool Exchange::ask(Job & job, Clock::time_point now) {
    Request request;
    request.id          = job.id = next_id_++;
    request.model       = job.table->model;
    request.program     = input_->program;
    request.term        = job.table->term;
    request.layer       = uint32_t(input_->layer);
    request.reduce      = job.table->reduce;
    request.dtype       = job.table->dtype;
    request.n_rows      = uint32_t(job.n_rows());
    request.n_pairs     = uint32_t(job.n_pairs());
    request.n_in        = uint32_t(input_->n_in);
    request.n_h         = uint32_t(job.h.size());
    request.h           = job.h.data();
    request.row         = job.row.data();
    request.expert      = job.expert.data();
    request.weight      = input_->uses_weight ? job.weight.data() : nullptr;
    request.deadline_ms = uint64_t(std::ceil(std::max(1.0, ms_between(now, job.deadline))));

    WebSocket &   socket = job.peer->socket;
    MsgpackWriter writer = socket.begin_message(request_bytes_bound(request));
    if (!encode_request(request, writer, problem_)) {
        return fail(job, problem_, now);
    }
    job.asked_at = now;
    job.state    = Job::State::asked;
    socket.set_max_message_bytes(reply_bytes(job) + error_bytes);
    socket.end_message(writer);
    return true;
}

bool Exchange::take_reply(size_t index, Clock::time_point now) {
    Job &       job     = split_->job(index);
    Peer &      peer    = *job.peer;
    const Bytes message = peer.socket.message();
    Reply       reply;
    bool        ok = decode_reply(message.data, message.size, reply, problem_);
    if (ok && reply.id != job.id && !(reply.is_error && reply.id == 0)) {
        problem_ = "the reply belongs to call " + std::to_string(reply.id) + ", not to call " + std::to_string(job.id);
        ok       = false;
    }
    if (ok && !reply.is_error && reply.y.size != reply_bytes(job)) {
        problem_ = "the reply has " + std::to_string(reply.y.size) + " bytes of values instead of " +
                   std::to_string(reply_bytes(job));
        ok       = false;
    }
    if (!ok) {
        return fail(job, problem_, now);
    }
    if (reply.is_error) {
        return take_error(index, reply, now);
    }
    const double call_us    = ms_between(job.asked_at, now) * 1000;
    const double compute_us = std::min(double(reply.compute_us), call_us);  // what a node says of itself has limits
    const double queue_us   = std::min(double(reply.queue_us), call_us - compute_us);
    peer.answered(call_us, compute_us, queue_us, job.n_pairs());
    peers_.count_call(peer, input_->layer, job.n_pairs(), call_us, compute_us, queue_us);
    round_->note_reply(peer, job.asked_at, now, compute_us, queue_us);
    job.y       = reply.y;
    job.state   = Job::State::done;
    peer.asking = nullptr;
    peer.holder = &job;
    return true;
}

bool Exchange::take_error(size_t index, const Reply & reply, Clock::time_point now) {
    Job &             job  = split_->job(index);
    Peer &            peer = *job.peer;
    const std::string kind = printable(reply.error.kind);
    const std::string text = kind + ": " + printable(reply.error.message);
    const bool        retry = reply.error.retry;
    peer.socket.release_message();
    peer.asking = nullptr;
    if (retry) {
        return broken(index, text, now);
    }
    // Of these another holder of the slice may be free; of the others every node would say the same.
    if (kind != "not_held" && kind != "unknown_model" && kind != "program_mismatch" && kind != "failed") {
        return fail(job, text, now);
    }
    job.problem = text;
    job.given_up.push_back(job.peer);
    return next_node(index, now);
}

bool Exchange::broken(size_t index, const std::string & problem, Clock::time_point now) {
    Job & job = split_->job(index);
    if (job.peer->asking == &job) {
        job.peer->asking = nullptr;
    }
    peers_.count_bytes(*job.peer);
    job.peer->troubled(now);
    job.problem = problem;
    return next_node(index, now);
}

bool Exchange::late(size_t index, Clock::time_point now) {
    Job &             job    = split_->job(index);
    Peer &            peer   = *job.peer;
    const std::string waited = ms_text(ms_between(job.begun, now));
    const std::string before = job.problem.empty() ? "" : "; before that: " + job.problem;
    std::string       problem;
    if (job.state == Job::State::waiting) {
        problem = "no success within " + waited +
                  (job.problem.empty() ? ", its connection was taken by another call" : "; last: " + job.problem);
    } else if (peer.socket.state() == WebSocket::State::connecting) {
        problem = "the connection was not accepted within " + waited + before;
    } else if (job.state == Job::State::connecting) {
        problem = "the WebSocket upgrade was not answered within " + waited + before;
    } else {
        problem = "no reply within " + waited + " (" + std::to_string(peer.socket.bytes_unsent()) +
                  " bytes of the request not sent yet, " + std::to_string(peer.socket.bytes_pending()) +
                  " of the reply received)" + before;
    }
    if (peer.asking == &job) {
        peer.socket.close(problem);
        peer.asking = nullptr;
    }
    peers_.count_bytes(peer);
    peer.missed_deadline(now);
    job.problem = problem;
    if (!job.is_hurried) {
        job.given_up.push_back(&peer);
    }
    return next_node(index, now);
}

// Looks for a newer table first.
bool Exchange::is_of_former_table(const Job & job) {
    auto newest = newest_.get();
    if (newest != *table_ && fits(*newest, **table_, input_->layer)) {
        former_tables_.push_back(std::move(*table_));
        *table_ = std::move(newest);
        peers_.follow(**table_);
        split_->follow(**table_);
    }
    return job.table != table_->get();
}

bool Exchange::replan(size_t index, Clock::time_point now) {
    const size_t first_new = split_->n_jobs();
    split_->replan(index, peers_, now);
    for (size_t i = first_new; i < split_->n_jobs(); i++) {
        Job & job = split_->job(i);
        if (contains(job.given_up, &peers_.at(job.node))) {
            return fail(job, job.problem, now);
        }
        begin(job, job.node, now);
    }
    return true;
}

bool Exchange::next_node(size_t index, Clock::time_point now) {
    return is_of_former_table(split_->job(index)) ? replan(index, now) : other_node(index, now);
}

bool Exchange::other_node(size_t index, Clock::time_point now) {
    if (!split_->job(index).is_uniform) {
        const size_t first_new = split_->n_jobs();
        split_->separate(index);
        for (size_t i = first_new; i < split_->n_jobs(); i++) {
            if (!other_node(i, now)) {
                return false;
            }
        }
    }
    Job &                    job   = split_->job(index);
    const std::vector<int> & nodes = *job.nodes;
    const size_t             n     = nodes.size();
    const size_t             from  = size_t(std::find(nodes.begin(), nodes.end(), job.node) - nodes.begin());
    for (size_t i = 1; i <= n; i++) {
        const int node = nodes[(from + i) % n];
        if (!contains(job.given_up, &peers_.at(node))) {
            begin(job, node, now);
            return true;
        }
    }
    return fail(job, job.problem, now);
}

bool Exchange::fail(const Job & job, const std::string & reason, Clock::time_point now) {
    failure_->node         = job.peer->node.name;
    failure_->layer        = input_->layer;
    failure_->first_expert = job.first_expert;
    failure_->last_expert  = job.last_expert;
    failure_->reason       = reason;
    failure_->waited_ms    = ms_between(job.begun, now);
    return false;
}

bool Exchange::wait(Clock::time_point now) {
    polled_.clear();
    polled_peers_.clear();
    Clock::time_point until = Clock::time_point::max();
    for (size_t i = 0; i < split_->n_jobs(); i++) {
        const Job & job = split_->job(i);
        if (job.state == Job::State::done) {
            continue;
        }
        until = std::min(until, job.deadline);
        if (job.state == Job::State::waiting) {
            if (!job.peer->asking) {
                until = std::min(until, job.peer->next_attempt);
            }
            continue;
        }
        WebSocket & socket = job.peer->socket;
        if (socket.state() == WebSocket::State::closed || socket.has_message()) {
            return true;  // broke or was answered while it was asked: nothing to wait for
        }
        const int events = (socket.want_read() ? POLLIN : 0) | (socket.want_write() ? POLLOUT : 0);
        polled_.push_back({socket.fd(), short(events), 0});
        polled_peers_.push_back(job.peer);
    }
    const double timeout_ms = std::ceil(std::max(0.0, ms_between(now, until)));
    const int    n = poll_(polled_.data(), nfds_t(polled_.size()), int(std::min(timeout_ms, 60000.0)));
    if (n < 0 && errno != EINTR) {
        failure_->layer  = input_->layer;
        failure_->reason = "poll() failed: " + error_text(errno);
        return false;
    }
    for (size_t i = 0; n > 0 && i < polled_.size(); i++) {
        WebSocket & socket = polled_peers_[i]->socket;
        const int   events = polled_[i].revents;
        if ((events & (POLLOUT | POLLERR | POLLHUP)) && socket.want_write()) {
            socket.on_writable();
        }
        if ((events & (POLLIN | POLLERR | POLLHUP)) && socket.want_read()) {
            socket.on_readable();
        }
    }
    return true;
}

}  // namespace swarm
