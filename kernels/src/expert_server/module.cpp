// The extension module kernels._kernels.

#include "expert_server/call_server.hpp"
#include "expert_server/expert_store.hpp"
#include "common/program.hpp"
#include "expert_server/weight_types.hpp"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <dlfcn.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>

namespace py = pybind11;

namespace {

using FloatArray = py::array_t<float, py::array::c_style>;
using IntArray   = py::array_t<int32_t, py::array::c_style>;

struct Device {
    std::string name;
    std::string description;
    std::string type;
    std::string backend;
    std::string chip;  // the PCI address in lower case; empty: not known
    uint64_t    memory_free_bytes  = 0;
    uint64_t    memory_total_bytes = 0;
    bool        computes_ffn       = false;
};

const char * type_name(enum ggml_backend_dev_type type) {
    switch (type) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:   return "cpu";
        case GGML_BACKEND_DEVICE_TYPE_GPU:   return "gpu";
        case GGML_BACKEND_DEVICE_TYPE_IGPU:  return "igpu";
        case GGML_BACKEND_DEVICE_TYPE_ACCEL: return "accel";
        default:                             return "other";
    }
}

// The ops of a SwiGLU expert, on the types that models use most. A device that lacks one cannot hold experts.
bool computes_ffn(ggml_backend_dev_t device) {
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K }) {
        const ggml_init_params params = { 16 * ggml_tensor_overhead(), nullptr, true };
        const ggml_context_ptr context(ggml_init(params));
        ggml_context * c   = context.get();
        ggml_tensor *  w   = ggml_new_tensor_3d(c, type, 256, 256, 4);
        ggml_tensor *  h   = ggml_new_tensor_3d(c, GGML_TYPE_F32, 256, 1, 2);
        ggml_tensor *  ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, 1, 2);
        ggml_tensor *  up  = ggml_mul_mat_id(c, w, h, ids);
        ggml_tensor *  act = ggml_swiglu_split(c, up, up);
        for (const ggml_tensor * op : { up, act, ggml_mul(c, act, act) }) {
            if (!ggml_backend_dev_supports_op(device, op)) {
                return false;
            }
        }
    }
    return true;
}

std::vector<Device> devices() {
    std::vector<Device> found;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        const ggml_backend_dev_t device = ggml_backend_dev_get(i);
        Device d;
        d.name = ggml_backend_dev_name(device);
        // Remote experts are no device to hold experts on.
        if (d.name == "Swarm") {
            continue;
        }
        ggml_backend_dev_props props = {};
        ggml_backend_dev_get_props(device, &props);
        d.description        = ggml_backend_dev_description(device);
        d.type               = type_name(ggml_backend_dev_type(device));
        d.backend            = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
        d.chip               = props.device_id != nullptr ? props.device_id : "";
        d.memory_free_bytes  = props.memory_free;
        d.memory_total_bytes = props.memory_total;
        d.computes_ffn       = computes_ffn(device);
        found.push_back(std::move(d));
    }
    return found;
}

std::string library_path() {
    Dl_info info = {};
    const int found = dladdr(reinterpret_cast<void *>(&ggml_commit), &info);
    return found != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

FloatArray ffn(swarm::ExpertStore & store, uint64_t program_digest, int layer, const FloatArray & h,
               const IntArray & row, const IntArray & expert, const std::optional<FloatArray> & weight, int64_t n_rows,
               const std::string & reduce) {
    if (h.ndim() != 2 || row.ndim() != 1 || expert.ndim() != 1 || row.shape(0) != expert.shape(0) ||
        (weight && (weight->ndim() != 1 || weight->shape(0) != row.shape(0)))) {
        throw swarm::BadCall("layer " + std::to_string(layer) +
                             ": h must be [n, n_in]; row, expert and weight [n_pairs], all of one length");
    }
    if (reduce != "rows" && reduce != "sum") {
        throw swarm::BadCall("layer " + std::to_string(layer) + ": reduce must be 'rows' or 'sum'");
    }
    swarm::FfnCall call;
    call.layer          = layer;
    call.program_digest = program_digest;
    call.h              = h.data();
    call.n_h            = h.shape(0);
    call.n_in           = h.shape(1);
    call.row            = row.data();
    call.expert         = expert.data();
    call.weight         = weight ? weight->data() : nullptr;
    call.n_pairs        = row.shape(0);
    call.n_rows         = n_rows;
    call.reduce         = reduce == "rows" ? swarm::Reduce::rows : swarm::Reduce::sum;
    const int64_t n = call.reduce == swarm::Reduce::rows ? call.n_pairs : n_rows;
    // The most that a message may ask for: docs/protocol.md, "Limits".
    constexpr int64_t rows_max = int64_t{ 1 } << 20;
    if (n_rows < 0 || n > rows_max) {
        throw swarm::BadCall("layer " + std::to_string(layer) + ": " + std::to_string(n) + " rows asked for");
    }
    call.n_out = store.n_out(layer);
    FloatArray out({ n, call.n_out });
    float *    target = out.mutable_data();
    {
        const py::gil_scoped_release release;
        store.ffn(call, target);
    }
    return out;
}

// One tensor of an expert as ggml's scalar code reads it: [n_values] float64.
py::array_t<double> dequantise(const std::string & type, int64_t row_values, const py::buffer & data,
                               int64_t n_values) {
    const py::buffer_info info = data.request();
    if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1) {
        throw py::type_error("the data must be bytes");
    }
    if (n_values < 0 || n_values > int64_t{ 1 } << 40) {
        throw std::invalid_argument(std::to_string(n_values) + " values");
    }
    py::array_t<double> out(n_values);
    double * const      target = out.mutable_data();
    {
        const py::gil_scoped_release release;
        swarm::dequantise(type, row_values, n_values, static_cast<const uint8_t *>(info.ptr),
                          static_cast<size_t>(info.size), target);
    }
    return out;
}

}  // namespace

namespace {

// Serves until the connection ends, without the GIL. `answer(message or None, age_s)` gives the reply's bytes.
void serve(swarm::CallConnection & connection, const py::object & answer) {
    const py::gil_scoped_release release;
    connection.serve([&](const uint8_t * data, size_t size, double age_s, const swarm::CallConnection::Reply & reply) {
        const py::gil_scoped_acquire acquire;
        py::object                   message = py::none();
        if (data != nullptr) {
            message = py::bytes(reinterpret_cast<const char *>(data), size);
        }
        const py::buffer      body = answer(std::move(message), age_s);
        const py::buffer_info info = body.request();
        if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1) {
            throw py::type_error("the answer to a message must be bytes");
        }
        const py::gil_scoped_release release_again;
        reply(info.ptr, static_cast<size_t>(info.size));
    });
}

py::dict counters(const swarm::CallServer & server) {
    const swarm::CallCounters c = server.counters();
    return py::dict(py::arg("calls") = c.calls, py::arg("pairs") = c.pairs,
                    py::arg("bytes_received") = c.bytes_received, py::arg("bytes_sent") = c.bytes_sent,
                    py::arg("queue_us") = c.queue_us, py::arg("compute_us") = c.compute_us);
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    py::register_exception<swarm::ProgramError>(m, "ProgramError", PyExc_ValueError);
    py::register_exception<swarm::LoadError>(m, "LoadError", PyExc_RuntimeError);
    py::register_exception<swarm::BadCall>(m, "BadCall", PyExc_ValueError);
    py::register_exception<swarm::NotHeld>(m, "NotHeld", PyExc_LookupError);
    py::register_exception<swarm::ProgramMismatch>(m, "ProgramMismatch", PyExc_ValueError);
    const auto compute_error = py::register_exception<swarm::ComputeError>(m, "ComputeError", PyExc_RuntimeError);
    // After its base, since the last one registered is asked first.
    py::register_exception<swarm::NotFinite>(m, "NotFinite", compute_error);

    m.attr("build_id") = SWARM_BUILD_ID;
    m.def("ggml_commit", [] { return std::string(ggml_commit()); });
    m.def("ggml_library_path", &library_path);

    py::class_<Device>(m, "Device")
        .def_readonly("name", &Device::name)
        .def_readonly("description", &Device::description)
        .def_readonly("type", &Device::type)
        .def_readonly("backend", &Device::backend)
        .def_readonly("chip", &Device::chip)
        .def_readonly("memory_free_bytes", &Device::memory_free_bytes)
        .def_readonly("memory_total_bytes", &Device::memory_total_bytes)
        .def_readonly("computes_ffn", &Device::computes_ffn);
    m.def("devices", &devices);
    m.def("dequantise", &dequantise, py::arg("type"), py::arg("row_values"), py::arg("data"), py::arg("n_values"));

    py::class_<swarm::Program>(m, "Program")
        .def(py::init(&swarm::Program::parse), py::arg("text"))
        .def_property_readonly("text", &swarm::Program::text)
        .def_property_readonly("digest", &swarm::Program::digest)
        .def_property_readonly("input", [](const swarm::Program & p) { return p.input_pair ? "pair" : "row"; })
        .def_property_readonly("uses_weight", &swarm::Program::uses_weight)
        .def_property_readonly("tensors", &swarm::Program::tensors);

    py::class_<swarm::SliceInfo>(m, "SliceInfo")
        .def_readonly("layer", &swarm::SliceInfo::layer)
        .def_readonly("first", &swarm::SliceInfo::first)
        .def_readonly("last", &swarm::SliceInfo::last)
        .def_readonly("n_in", &swarm::SliceInfo::n_in)
        .def_readonly("n_out", &swarm::SliceInfo::n_out)
        .def_readonly("bytes", &swarm::SliceInfo::bytes);

    py::class_<swarm::TensorParts>(m, "TensorParts")
        .def(py::init([](std::string type, std::vector<int64_t> ne,
                         const std::vector<std::tuple<std::string, uint64_t, uint64_t>> & parts) {
                 swarm::TensorParts t;
                 t.type = std::move(type);
                 t.ne   = std::move(ne);
                 for (const auto & [path, offset, bytes] : parts) {
                     t.parts.push_back({ path, offset, bytes });
                 }
                 return t;
             }),
             py::arg("type"), py::arg("ne"), py::arg("parts"));

    py::class_<swarm::ExpertStore, std::shared_ptr<swarm::ExpertStore>>(m, "ExpertStore")
        .def(py::init<const std::string &, int>(), py::arg("device"), py::arg("threads"))
        .def_property_readonly("device", &swarm::ExpertStore::device)
        .def_property_readonly("threads", &swarm::ExpertStore::threads)
        .def("load", &swarm::ExpertStore::load, py::arg("layer"), py::arg("program"), py::arg("first"), py::arg("last"),
             py::arg("n_expert"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>())
        .def("drop", &swarm::ExpertStore::drop, py::arg("layer"), py::arg("first"), py::arg("last"),
             py::call_guard<py::gil_scoped_release>())
        .def("slices", &swarm::ExpertStore::slices)
        .def("set_part_products_max", &swarm::ExpertStore::set_part_products_max, py::arg("n_products"))
        .def("kept_graphs", &swarm::ExpertStore::kept_graphs, py::call_guard<py::gil_scoped_release>())
        .def("ffn", &ffn, py::arg("program_digest"), py::arg("layer"), py::arg("h").noconvert(),
             py::arg("row").noconvert(), py::arg("expert").noconvert(), py::arg("weight").noconvert(),
             py::arg("n_rows"), py::arg("reduce"));

    py::class_<swarm::CallServer, std::shared_ptr<swarm::CallServer>>(m, "CallServer")
        .def(py::init(
                 [](const std::string & device, int64_t max_rows, size_t waiting_max, int64_t poll_us, double delay_s) {
                     return std::make_shared<swarm::CallServer>(device, max_rows, waiting_max,
                                                                std::chrono::microseconds(poll_us), delay_s);
                 }),
             py::arg("device"), py::arg("max_rows"), py::arg("waiting_max"), py::arg("poll_us") = 0,
             py::arg("delay_s") = 0.0)
        .def(
            "publish",
            [](swarm::CallServer & server, const std::string & model, int layer,
               std::shared_ptr<swarm::ExpertStore> store, uint64_t program_digest, int64_t n_in, int64_t n_out,
               int64_t n_used, bool per_pair, bool uses_weight, const py::bytes & ready) {
                const std::string each = ready;
                server.publish(model, layer,
                               {std::move(store), program_digest, n_in, n_out, n_used, per_pair, uses_weight,
                                std::vector<uint8_t>(each.begin(), each.end())});
            },
            py::arg("model"), py::arg("layer"), py::arg("store"), py::arg("program_digest"), py::arg("n_in"),
            py::arg("n_out"), py::arg("n_used"), py::arg("per_pair"), py::arg("uses_weight"), py::arg("ready"))
        .def("withdraw", &swarm::CallServer::withdraw, py::arg("model"), py::arg("layer"))
        .def("set_term", &swarm::CallServer::set_term, py::arg("model"), py::arg("term"))
        .def("counters", &counters)
        .def_property_readonly("waiting", &swarm::CallServer::waiting);

    py::class_<swarm::CallConnection>(m, "CallConnection")
        .def(py::init([](std::shared_ptr<swarm::CallServer> server, int fd, size_t max_message_bytes, double silence_s,
                         double linger_s) {
                 return std::make_unique<swarm::CallConnection>(std::move(server), fd, max_message_bytes,
                                                                swarm::CallConnection::Timeouts{ silence_s, linger_s });
             }),
             py::arg("server"), py::arg("fd"), py::arg("max_message_bytes"), py::arg("silence_s"), py::arg("linger_s"))
        .def("serve", &serve, py::arg("answer"))
        .def("renew", &swarm::CallConnection::renew)
        .def("stop", &swarm::CallConnection::stop);
}
