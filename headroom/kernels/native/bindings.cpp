// The Python module `_native`: functions over plain addresses and sizes that release the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cold.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headroom {
namespace {

using Address = uintptr_t;

template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }

Kind checked_kind(int kind) {
    if (kind_info(static_cast<Kind>(kind)).block == 0)
        throw std::invalid_argument("weights of GGUF type " + std::to_string(kind) + " are unknown");
    return static_cast<Kind>(kind);
}

Products checked_products(int products) {
    if (products < 0 || products > static_cast<int>(Products::int8))
        throw std::invalid_argument("products " + std::to_string(products) + " are unknown");
    return static_cast<Products>(products);
}

Matrix make_matrix(Address data, int kind, int64_t rows, int64_t columns, bool tiles = false) {
    if (tiles && checked_kind(kind) == F32) throw std::invalid_argument("F32 weights have no tiles");
    return {at<const uint8_t>(data), checked_kind(kind), rows, columns, tiles};
}

// Reads a table of spans [count, 5]: first row, rows, start, offset of its pages in `pages`, offset of its
// tree in `trees` (-1: no tree).
std::vector<SpanView> read_spans(Address table, int64_t count, Address pages, Address trees) {
    std::vector<SpanView> spans;
    spans.reserve(static_cast<size_t>(count));
    const int64_t* row = at<const int64_t>(table);
    for (int64_t i = 0; i < count; ++i, row += 5)
        spans.push_back({row[0], row[1], row[2], pages ? at<const int64_t>(pages) + row[3] : nullptr,
                         row[4] < 0 ? nullptr : at<const uint8_t>(trees) + row[4]});
    return spans;
}

struct Lent {  // scratch memory that Python lends for one call
    Address data;
    size_t bytes;
    Scratch open() const { return Scratch(at<uint8_t>(data), bytes); }
};

KvCache make_cache(Address keys, int k_kind, int64_t k_head_bytes, Address values, int v_kind,
                   int64_t v_head_bytes, int64_t kv_heads, int page_size) {
    return {{at<uint8_t>(keys), checked_kind(k_kind), k_head_bytes * kv_heads, k_head_bytes},
            {at<uint8_t>(values), checked_kind(v_kind), v_head_bytes * kv_heads, v_head_bytes},
            page_size};
}

// A decoder layer's weights with its KV cache.
struct Layer {
    LayerWeights weights;
    KvCache cache;
    Products products;
};

void bind_ops(nb::module_& m) {
    nb::class_<Ops>(m, "Ops")
        .def("__init__", [](Ops* self, int threads, bool pin, const std::string& isa) {
            const Kernels* kernels = isa.empty() ? &best_kernels() : find_kernels(isa.c_str());
            if (!kernels) throw std::invalid_argument("this CPU cannot run " + isa + " kernels");
            new (self) Ops(*kernels, threads, pin);
        }, "threads"_a, "pin"_a = false, "isa"_a = "")
        .def_prop_ro("isa", [](const Ops& self) { return std::string(self.kernels().name); })
        .def_prop_ro("threads", &Ops::threads)
        .def("pack", [](Ops& self, int kind, int64_t rows, int64_t columns, Address from, Address to) {
            nb::gil_scoped_release released;
            self.pack(checked_kind(kind), rows, columns, at<const uint8_t>(from), at<uint8_t>(to));
        })
        .def("unpack", [](Ops& self, Address data, int kind, int64_t rows, int64_t columns,
                          Address ids, int64_t count, Address out) {
            const Matrix w = make_matrix(data, kind, rows, columns);
            nb::gil_scoped_release released;
            self.unpack(w, at<const int64_t>(ids), count, at<float>(out));
        })
        .def("read_bytes", [](Ops& self, Address data, int64_t bytes) {
            nb::gil_scoped_release released;
            return self.read_bytes(at<const uint8_t>(data), bytes);
        })
        .def("matmul", [](Ops& self, Address data, int kind, int64_t rows, int64_t columns, Address x,
                          int64_t count, int products, Address out, Address scratch, size_t bytes) {
            const Matrix w = make_matrix(data, kind, rows, columns);
            const Products kind_of = checked_products(products);
            nb::gil_scoped_release released;
            self.matmul(w, at<const float>(x), count, kind_of, at<float>(out),
                        Lent{scratch, bytes}.open());
        })
        .def("write_kv", [](Ops& self, const KvCache& cache, int64_t kv_heads, int64_t dim,
                            Address slots, Address keys, Address values, int64_t rows) {
            nb::gil_scoped_release released;
            self.write_kv(cache, kv_heads, dim, at<const int64_t>(slots), at<const float>(keys),
                          at<const float>(values), rows);
        })
        .def("attention", [](Ops& self, const KvCache& cache, std::array<int64_t, 4> sizes,
                             float scale, Address queries, Address table, int64_t count,
                             Address pages, Address trees, Address out) {
            const AttentionShape shape{sizes[0], sizes[1], sizes[2], sizes[3], scale};
            const auto spans = read_spans(table, count, pages, trees);
            nb::gil_scoped_release released;
            constexpr size_t LITTLE = 4 << 20;  // bytes allocated beyond the plan, only to be faster
            const size_t bytes = std::max(self.attention_scratch(shape, spans.data(), count),
                                          std::min(LITTLE, self.split_scratch(shape, spans.data(), count)));
            const std::unique_ptr<uint8_t[]> scratch(new uint8_t[bytes + 64]);
            uint8_t* aligned = at<uint8_t>((reinterpret_cast<Address>(scratch.get()) + 63) / 64 * 64);
            self.attention(shape, cache, at<const float>(queries), spans.data(), count,
                           at<float>(out), Scratch(aligned, bytes));
        })
        .def("route", [](Ops& self, std::array<int64_t, 3> sizes, std::array<bool, 2> flags,
                         std::array<float, 2> factors, Address logits, Address bias, Address counts,
                         Address ids, Address weights) {
            const RouterRule rule{sizes[2], flags[0], flags[1], factors[0], factors[1]};
            nb::gil_scoped_release released;
            self.route(rule, at<const float>(logits), sizes[0], sizes[1], at<const float>(bias),
                       at<int64_t>(counts), at<int32_t>(ids), at<float>(weights));
        })
        .def("delta_net", [](Ops& self, std::array<int64_t, 4> sizes, bool tiled,
                             std::array<Address, 3> w, std::array<Address, 2> state, Address spans,
                             int64_t count, Address parents, std::array<Address, 6> a) {
            const DeltaShape shape{sizes[0], sizes[1], sizes[2], sizes[3], tiled};
            nb::gil_scoped_release released;
            self.delta_net(shape, {at<const float>(w[0]), at<const float>(w[1]), at<const float>(w[2])},
                           {at<float>(state[0]), at<float>(state[1])}, at<const DeltaSpan>(spans),
                           count, at<const int64_t>(parents), at<const float>(a[0]),
                           at<const float>(a[1]), at<const float>(a[2]), at<float>(a[3]),
                           at<float>(a[4]), at<float>(a[5]));
        })
        .def("gated_norm", [](Ops& self, Address x, Address gate, Address weight,
                              std::array<int64_t, 2> sizes, float eps, Address out) {
            nb::gil_scoped_release released;
            self.gated_norm(at<const float>(x), at<const float>(gate), at<const float>(weight),
                            sizes[0], sizes[1], eps, at<float>(out));
        })
        .def("rms_norm", [](Ops& self, Address x, Address weight, int64_t rows, int64_t columns,
                            float eps, Address out) {
            nb::gil_scoped_release released;
            self.rms_norm(at<const float>(x), at<const float>(weight), rows, columns, eps,
                          at<float>(out));
        })
        .def("rope", [](Ops& self, Address x, std::array<int64_t, 4> sizes, Address cos, Address sin,
                        Address out) {
            nb::gil_scoped_release released;
            self.rope(at<const float>(x), sizes[0], sizes[1], sizes[2], at<const float>(cos),
                      at<const float>(sin), sizes[3], at<float>(out));
        })
        .def("gated", [](Ops& self, bool gelu, Address gate, Address up, int64_t count, Address out) {
            nb::gil_scoped_release released;
            self.gated(gelu ? Gate::gelu : Gate::silu, at<const float>(gate), at<const float>(up),
                       count, at<float>(out));
        });
}

ColdLayer make_cold_layer(const std::vector<Matrix>& like, Address table, std::array<int64_t, 2> sizes,
                          bool gelu) {
    if (like.size() != 3) throw std::invalid_argument("an expert has three matrices");
    return {like[0], like[1], like[2], at<const ExpertWeights>(table), sizes[0], sizes[1],
            gelu ? Gate::gelu : Gate::silu};
}

void bind_cold(nb::module_& m) {
    nb::class_<ColdLayer>(m, "ColdLayer")
        .def("__init__", [](ColdLayer* self, std::vector<Matrix> like, Address table,
                            std::array<int64_t, 2> sizes, bool gelu) {
            new (self) ColdLayer(make_cold_layer(like, table, sizes, gelu));
        });
    nb::class_<ColdWorker>(m, "ColdWorker")
        .def("__init__", [](ColdWorker* self, Ops& ops, std::array<Address, 10> words,
                            std::vector<ColdLayer> layers, int64_t most_rows) {
            new (self) ColdWorker(ops, {at<uint32_t>(words[0]), at<uint32_t>(words[1]),
                                        at<const int32_t>(words[2]), at<const int32_t>(words[3]),
                                        at<uint32_t>(words[4]), at<uint32_t>(words[5]),
                                        at<const int32_t>(words[6]), at<const float>(words[7]),
                                        at<const float>(words[8]), at<float>(words[9])},
                                  std::move(layers), most_rows);
        }, nb::keep_alive<1, 2>())
        .def("begin_step", &ColdWorker::begin_step)
        .def("failure", &ColdWorker::failure)
        .def("counts", [](const ColdWorker& self) {
            const ColdCounts& found = self.counts();
            return std::vector<int64_t>{found.requests, found.picks, found.experts, found.bytes,
                                        found.busy_ns, found.sleeps};
        })
        .def("layer_counts", [](const ColdWorker& self) {
            std::vector<std::array<int64_t, 4>> rows;
            for (const ColdLayerCounts& found : self.layer_counts())
                rows.push_back({found.requests, found.experts, found.bytes, found.busy_ns});
            return rows;
        });
}

}  // namespace
}  // namespace headroom

NB_MODULE(_native, m) {
    using namespace headroom;
    nb::set_leak_warnings(false);  // a pool that is still alive at the end of the process is no leak
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const char* name : ISAS)
            if (find_kernels(name)) names.emplace_back(name);
        return names;
    });
    m.def("panel_bytes", [](int kind, int64_t rows, int64_t columns) {
        return panel_bytes(checked_kind(kind), rows, columns);
    });
    m.def("matmul_scratch", &Ops::matmul_scratch);
    nb::class_<KvCache>(m, "KvCache").def("__init__", [](KvCache* self, Address keys, int k_kind,
            int64_t k_head_bytes, Address values, int v_kind, int64_t v_head_bytes, int64_t kv_heads,
            int page_size) {
        new (self) KvCache(make_cache(keys, k_kind, k_head_bytes, values, v_kind, v_head_bytes,
                                      kv_heads, page_size));
    });
    nb::class_<Matrix>(m, "Matrix").def("__init__", [](Matrix* self, Address data, int kind,
                                                       int64_t rows, int64_t columns, bool tiles) {
        new (self) Matrix(make_matrix(data, kind, rows, columns, tiles));
    }, "data"_a, "kind"_a, "rows"_a, "columns"_a, "tiles"_a = false);
    bind_ops(m);
    nb::class_<Layer>(m, "Layer")
        .def("__init__", [](Layer* self, std::vector<Matrix> w, Address attention_norm,
                            Address ffn_norm, float eps, std::array<int64_t, 4> sizes, float scale,
                            const KvCache& cache, int products) {
            if (w.size() != 7) throw std::invalid_argument("a layer has seven matrices");
            new (self) Layer{{w[0], w[1], w[2], w[3], w[4], w[5], w[6],
                              at<const float>(attention_norm), at<const float>(ffn_norm), eps,
                              {sizes[0], sizes[1], sizes[2], sizes[3], scale}},
                             cache, checked_products(products)};
        })
        .def("scratch_bytes", [](const Layer& self, Ops& ops, std::array<int64_t, 2> sizes,
                                 Address table, int64_t count) {
            const auto spans = read_spans(table, count, 0, 0);
            return ops.layer_scratch(self.weights, {sizes[0], sizes[1], nullptr, nullptr, nullptr,
                                                    spans.data(), count});
        })
        .def("run", [](const Layer& self, Ops& ops, std::array<int64_t, 2> sizes, Address x,
                       Address cos, Address sin, Address slots, Address table, int64_t count,
                       Address pages, Address trees, Address scratch, size_t bytes) {
            const auto spans = read_spans(table, count, pages, trees);
            nb::gil_scoped_release released;
            const StepView step{sizes[0], sizes[1], at<const float>(cos), at<const float>(sin),
                                at<const int64_t>(slots), spans.data(), count};
            ops.layer(self.weights, self.cache, step, self.products, at<float>(x),
                      Lent{scratch, bytes}.open());
        });
    m.def("experts", [](Ops& ops, std::vector<Matrix> like, Address table, int64_t expert_count,
                        Address ids, Address weights, std::array<int64_t, 2> sizes, Address x,
                        bool gelu, int products, Address out, Address scratch, size_t bytes) {
        if (like.size() != 3) throw std::invalid_argument("an expert has three matrices");
        const Products kind_of = checked_products(products);
        nb::gil_scoped_release released;
        ops.experts(like[0], like[1], like[2], at<const ExpertWeights>(table), expert_count,
                    at<const int32_t>(ids), at<const float>(weights), sizes[1], at<const float>(x),
                    sizes[0], gelu ? Gate::gelu : Gate::silu, kind_of, at<float>(out),
                    Lent{scratch, bytes}.open());
    });
    m.def("experts_scratch", &Ops::experts_scratch, "tokens"_a, "per_token"_a, "hidden"_a, "width"_a,
          "experts"_a, "tiles"_a = false);
    bind_cold(m);
}
