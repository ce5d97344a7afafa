"""model_rat: the layer against its equations and limits, its neighbours, caches, precision, and the paper's sizes."""
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import kernels
import model_gpt
import model_rat
import train
from conftest import ROOT, relative, tiny
from test_models import assert_cache_is_forward, assert_same, outputs_and_gradients, tokens

KINDS = {"rat": {}, "token": dict(pos="rope"), "nope": dict(pos="nope"), "shared": dict(qk_groups=1),
         "full": dict(qk_groups=4), "low rank": dict(gate_rank=5), "rnn": dict(mixer="rnn"),
         "attention": dict(mixer="attention"), "rat-swa": dict(swa=6), "attention-swa": dict(mixer="attention", swa=6),
         "reversed": dict(reversed=True), "reversed low rank": dict(reversed=True, gate_rank=3, pos="nope")}
every = pytest.mark.parametrize("kind", KINDS)


def rat(kind="rat", **sizes):
    """The tiny float64 model of conftest of this kind, in chunks of 4."""
    return tiny("rat", **{"chunk": 4, **KINDS[kind], **sizes})


def layer(kind="rat", **sizes):
    """The first layer's mixer, and its input (2, 23, C)."""
    model = rat(kind, **sizes)
    return model, model.blocks[0].mix, torch.randn(2, 23, 32, dtype=torch.float64)


def output(model, mix, u):
    place = model_rat.Place(torch.arange(u.size(1))[None])
    with torch.no_grad():
        return mix(u, model_rat.with_rotary(model.cfg, place, u.dtype))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator made, the total, and the operators' names."""

    def __init__(self):
        super().__init__()
        self.elements, self.total, self.names = 0, 0, set()

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        out = op(*arguments, **(options or {}))
        self.names.add(op.overloadpacket.__name__)
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements, self.total = max(self.elements, x.numel()), self.total + x.numel()
        return out


# ---------------------------------------------------------------------------------------------------------------------
# the equations, once more, with numbers and loops

def turned(x, position):
    """x (D,) rotated to a position: pairs (i, i + D/2), by position * 10000^(-2i / D)."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-2 * torch.arange(half, dtype=x.dtype) / len(x))
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def gate_of(mix, g):
    return torch.sigmoid(g + mix.gate_bias)


def rat_by_hand(cfg, mix, u):
    """The layer of one sequence u (T, C), position after position, head after head."""
    C, D, H, G, L = cfg.n_embd, cfg.head_dim, cfg.n_head, cfg.qk_groups, cfg.chunk
    rank = cfg.gate_rank or C
    z, g, v, q, k = (u @ mix.w_in.weight.T).split([rank, rank, C, G * D, G * D], -1)
    if cfg.gate_rank:
        z, g = z @ mix.w_z.weight.T, g @ mix.w_g.weight.T
    g, out = gate_of(mix, g), torch.zeros_like(u)
    for h in range(H):
        mine, shared = slice(h * D, h * D + D), slice(h % G * D, h % G * D + D)
        ends, ks, vs = [], None, None
        for t in range(len(u)):
            if t % L == 0:
                ks = vs = torch.zeros(D, dtype=u.dtype)
            ks = g[t, mine] * ks + (1 - g[t, mine]) * k[t, shared]
            vs = g[t, mine] * vs + (1 - g[t, mine]) * v[t, mine]
            at = {"chunk": t // L, "rope": t, "nope": 0}[cfg.pos]
            read = ends + [(turned(ks, at), vs)]
            scores = torch.stack([turned(q[t, shared], at) @ key for key, _ in read]) / math.sqrt(D)
            out[t, mine] = sum(p * value for p, (_, value) in zip(scores.softmax(0), read))
            if t % L == L - 1:
                ends = read
    return (torch.sigmoid(z) * out) @ mix.wo.weight.T


def reversed_by_hand(cfg, mix, u):
    C, D, L = cfg.n_embd, cfg.head_dim, cfg.chunk
    z, g, v, k, q = (u @ mix.w_in.weight.T).split([cfg.gate_rank or D, C, C, C, D], -1)
    z, g, state, hs = z @ mix.w_z.weight.T, gate_of(mix, g), torch.zeros(C, dtype=u.dtype), []
    for t in range(len(u)):
        y, seen = torch.zeros(C, dtype=u.dtype), range(t // L * L, t + 1)
        for h in range(cfg.n_head):
            mine = slice(h * D, h * D + D)
            at = (lambda t: t) if cfg.pos != "nope" else (lambda t: 0)
            scores = torch.stack([turned(q[t], at(t)) @ turned(k[s, mine], at(s)) for s in seen]) / math.sqrt(D)
            y[mine] = sum(p * v[s, mine] for p, s in zip(scores.softmax(0), seen))
        hs.append(g[t] * state + (1 - g[t]) * y)
        if t % L == L - 1:
            state = hs[-1]
    return (torch.sigmoid(z) * torch.stack(hs)) @ mix.wo.weight.T


def rnn_by_hand(mix, u):
    z, g, v = (u @ mix.w_in.weight.T).chunk(3, -1)
    g, state, states = gate_of(mix, g), torch.zeros_like(u[0]), []
    for t in range(len(u)):
        state = g[t] * state + (1 - g[t]) * v[t]
        states.append(state)
    return (torch.sigmoid(z) * torch.stack(states)) @ mix.wo.weight.T


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 4, 23, 50])
@pytest.mark.parametrize("kind", ["rat", "token", "nope", "shared", "full", "low rank"])
def test_the_layer_is_its_equations(kind, chunk, fast):
    model, mix, u = layer(kind, chunk=chunk, fast=fast)
    assert relative(output(model, mix, u)[1], rat_by_hand(model.cfg, mix, u[1]).detach()) < 1e-10


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 4, 23, 50])
@pytest.mark.parametrize("kind", ["reversed", "reversed low rank"])
def test_reversed_is_its_equations(kind, chunk, fast):
    model, mix, u = layer(kind, chunk=chunk, fast=fast)
    assert relative(output(model, mix, u)[1], reversed_by_hand(model.cfg, mix, u[1]).detach()) < 1e-10


@pytest.mark.parametrize("fast", [True, False])
def test_one_chunk_of_all_is_an_rnn(fast):
    """L = T: each position reads its own state alone, so y = v~, whatever q and k are; and the layer of mixer=rnn."""
    model, mix, u = layer(chunk=23, fast=fast)
    rnn, its, _ = layer("rnn", fast=fast)
    with torch.no_grad():
        its.w_in.weight.copy_(torch.cat(mix.w_in.weight.split(mix.widths)[:3]))         # z, g, v
        its.gate_bias.copy_(mix.gate_bias), its.wo.weight.copy_(mix.wo.weight)
        want = torch.stack([rnn_by_hand(its, row) for row in u])
    assert relative(output(model, mix, u), want) < 1e-10
    assert relative(output(rnn, its, u), want) < 1e-10


@pytest.mark.parametrize("chunk", [1, 23])
def test_limits_of_the_reversed_design(chunk):
    """L = 1: the RNN. L = T: attention, times 1 - g."""
    model, mix, u = layer("reversed", chunk=chunk)
    z, g, v, k, q = (u @ mix.w_in.weight.T).split(mix.widths, -1)
    gate, D = gate_of(mix, g), model.cfg.head_dim
    if chunk == 1:
        h = torch.zeros_like(v)
        for t in range(u.size(1)):
            h[:, t] = gate[:, t] * (h[:, t - 1] if t else 0) + (1 - gate[:, t]) * v[:, t]
    else:
        v, k, q = (x.unflatten(-1, (-1, D)) for x in (v, k, q))
        tables = model_rat.rotary_tables(torch.arange(u.size(1)), D, 10000.0, u.dtype)
        q, k, v = (x.transpose(1, 2) for x in (model_gpt.apply_rotary(q, *tables).expand(v.shape),
                                               model_gpt.apply_rotary(k, *tables), v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = (1 - gate) * y.transpose(1, 2).flatten(2)
    want = (torch.sigmoid(z @ mix.w_z.weight.T) * h) @ mix.wo.weight.T
    assert relative(output(model, mix, u), want.detach()) < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# the plain Transformer

def from_gpt(gpt, model):
    """The state dict of `model` (mixer=attention) from model_gpt's."""
    model.load_state_dict({name.replace(".attn.", ".mix."): w for name, w in gpt.state_dict().items()})
    return model


@pytest.mark.parametrize("sizes", [dict(n_kv_head=2), dict(tie_embeddings=False, mlp="swiglu")], ids=str)
def test_attention_everywhere_is_the_plain_transformer(sizes):
    gpt = tiny("gpt", **{"mlp": "gelu", **sizes})
    model, x = from_gpt(gpt, rat("attention", **sizes)), tokens(2, 51)
    logits, loss, grads = outputs_and_gradients(gpt, x)
    grads = {n.replace(".attn.", ".mix."): g for n, g in grads.items()}
    assert_same(outputs_and_gradients(model, x), (logits, loss, grads), all_reached=True)


def test_nope_has_no_positions_but_in_windows():
    gpt = tiny("gpt", mlp="gelu", pos="none")
    assert relative(from_gpt(gpt, rat("attention", pos="nope"))(tokens(2, 30))[0], gpt(tokens(2, 30))[0]) < 1e-10
    place, kinds = model_rat.Place(torch.arange(3)[None]), ("rat", "rnn", "attention", "rat-swa", "reversed")
    tables = {k: model_rat.with_rotary(rat(k, pos="nope").cfg, place, torch.float32)[3:] for k in kinds}
    assert [k for k in kinds if tables[k] != (None, None)] == ["rat-swa"]


def test_reversed_without_positions_has_none_beside_windows_either():
    """The rotary tables of the windows are there, and not for it."""
    model, mix, u = layer("reversed", pos="nope", swa=6)
    assert relative(output(model, mix, u)[1], reversed_by_hand(model.cfg, mix, u[1]).detach()) < 1e-10


def test_a_window_is_model_gpts():
    """swa=6: a position sees itself and six before it, which model_gpt calls a window of 7."""
    gpt = tiny("gpt", mlp="gelu", window=7)
    model = rat("attention-swa")
    attention = model.blocks[1].mix
    attention.load_state_dict(gpt.blocks[1].attn.state_dict())
    u, place = torch.randn(2, 40, 32, dtype=torch.float64), torch.arange(40)
    tables = model_rat.rotary_tables(place, 8, 10000.0, u.dtype)
    want = gpt.blocks[1].attn(u, tables, gpt.bias(place[None], 40, None, torch.float64))
    assert relative(output(model, attention, u), want.detach()) < 1e-10
    kinds = lambda kind: [(type(b.mix).__name__, getattr(b.mix, "sliding", None)) for b in rat(kind, n_layer=4).blocks]
    assert kinds("attention-swa") == [("Attention", False), ("Attention", True)] * 2
    assert kinds("rat-swa") == [("Rat", None), ("Attention", True)] * 2


@pytest.mark.parametrize("fast", [True, False])
def test_chunks_of_one_with_open_gates_are_attention(fast):
    """L = 1 scales keys and values by 1 - g; with g = 0, one key a head and an output gate of 1/2 it is attention."""
    gpt = tiny("gpt", mlp="gelu")
    model, x = rat("full", chunk=1, fast=fast), tokens(2, 30)
    model.load_state_dict({n: w for n, w in gpt.state_dict().items() if ".attn." not in n}, strict=False)
    with torch.no_grad():
        for block, theirs in zip(model.blocks, gpt.blocks):
            zero, attn = torch.zeros(32, 32, dtype=torch.float64), theirs.attn
            block.mix.w_in.weight.copy_(torch.cat([zero, zero, attn.wv.weight, attn.wq.weight, attn.wk.weight]))
            block.mix.gate_bias.fill_(-1000.0)
            block.mix.wo.weight.copy_(2 * attn.wo.weight)
    assert relative(model(x)[0], gpt(x)[0]) < 1e-10


# ---------------------------------------------------------------------------------------------------------------------
# caches

@every
@pytest.mark.parametrize("fast", [True, False])
def test_decoding_around_the_ends_of_chunks(kind, fast):
    """Prompts shorter than, equal to and around multiples of L = 4, past block_size, rows of other lengths, then tokens
    one by one: the forward's logits, and in float32 to 1e-5."""
    model = rat(kind, fast=fast, block_size=16)
    for first in (1, 2, 3, 4, 5, 7, 8, 9, 17):
        assert_cache_is_forward(model, [26, 26], [first] + [1] * (26 - first), 1e-10)
    assert_cache_is_forward(model, [26, 9, 4], [3, 1, 1, 7, 8, 1, 5], 1e-10)
    assert_cache_is_forward(model, [60, 33], [40] + [1] * 20, 1e-10)
    assert_cache_is_forward(model.float(), [26, 13], [5] + [1] * 21, 1e-5)


def test_a_chunk_acts_later_through_its_end_alone():
    """Other tokens in the first chunk, but its end state put back: what follows is as before, exactly."""
    model, x = rat(), tokens(1, 22)
    y = x.clone()
    y[:, :4] = x[:, [2, 0, 3, 1]]
    with torch.no_grad():
        caches = [model.init_cache(1, 22) for _ in range(3)]
        for cache, prompt in zip(caches, (x, y, y)):
            model(prompt[:, :4], cache=cache)
        for mine, theirs in zip(caches[2].layers, caches[0].layers):
            assert not torch.equal(mine["k"], theirs["k"])
            for name in "kv":
                mine[name][:, :, 0] = theirs[name][:, :, 0]
        same, other, mended = (model(x[:, 4:], cache=cache)[0] for cache in caches)
    assert torch.equal(same, mended) and relative(same, other) > 1e-3


def test_cache_bytes():
    """T / L pairs a layer, 1/L of attention's, and two states; a window's ring; an RNN's state."""
    def nbytes(kind, T=4096, **sizes):
        return rat(kind, **sizes).float().init_cache(3, T).nbytes()
    pairs = lambda n: 2 * 2 * 3 * n * 32 * 4                                # layers, k and v, rows, entries, C, bytes
    state = 2 * 3 * 2 * 32 * 4
    assert nbytes("attention") == pairs(4096)
    assert nbytes("rat", chunk=16) == pairs(4096) // 16 + state
    assert nbytes("rat", chunk=16, T=4097) == pairs(257) + state
    assert nbytes("rat-swa", chunk=16) == (pairs(4096) // 16 + state + pairs(7)) // 2
    assert nbytes("rnn") == state // 2 and nbytes("reversed", chunk=16) == pairs(16) + state // 2


def test_the_state_is_float32_under_bfloat16(monkeypatch):
    """In a bfloat16 model and under autocast: what enters scan, the cache's states, and what kernels.rat hands over."""
    dtypes, scan = [], kernels.scan
    monkeypatch.setattr(kernels, "scan", lambda g, x, *a: (dtypes.extend([g.dtype, x.dtype]), scan(g, x, *a))[1])
    for kind in ("rat", "rnn", "reversed"):
        for whole in (True, False):
            model = rat(kind).bfloat16() if whole else rat(kind).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=not whole), torch.no_grad():
                cache = model.init_cache(2, 40)
                for part in tokens(2, 30).split([9, 1, 20], 1):
                    model(part, cache=cache)
            for store in cache.layers:
                assert store["state"].dtype == torch.float32
                assert "k" not in store or store["k"].dtype == torch.bfloat16
    assert set(dtypes) == {torch.float32} and len(dtypes) > 20


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("splits", [[512], [200, 312], [100] + [1] * 412])
def test_a_long_chunk_does_not_forget_in_bfloat16(splits, fast):
    """Gates near 1: a state that is rounded to bfloat16 on any path stops moving (1 - g is below its spacing)."""
    model = rat(chunk=512, block_size=512, n_layer=1, fast=fast)
    mix = model.blocks[0].mix
    with torch.no_grad():
        mix.gate_bias.fill_(6.0)
        mix.w_in.weight.fill_(0.0)
        mix.w_in.weight[64:96].copy_(torch.eye(32))                         # v = u, g = sigmoid(6), z = 1/2
        mix.wo.weight.copy_(2 * torch.eye(32))
        u, cache = torch.ones(1, 512, 32).bfloat16(), model.bfloat16().init_cache(1, 512)
        for part in u.split(splits, 1):
            place = model_rat.with_rotary(model.cfg, cache.place(part.size(1)), u.dtype)
            got = mix(part, place, cache.layers[0])[0, -1]
            cache.advance()
    want = torch.full((32,), 1 - torch.tensor(6.0).sigmoid().item() ** 512)
    assert relative(got, want) < 0.01
    assert relative(cache.layers[0]["state"][0, 1].flatten(), want) < 1e-4


def test_the_own_score_is_float32_under_bfloat16(monkeypatch):
    """What a query says to its own key is not rounded: the key is a float32 state."""
    dtypes = []
    for name in ("read_fast", "read_naive"):
        read = getattr(model_rat, name)
        monkeypatch.setattr(model_rat, name, lambda *a, read=read: (dtypes.append(a[3]), read(*a))[1])
    for fast in (True, False):
        model = rat(fast=fast).bfloat16()
        with torch.no_grad():
            model(tokens(2, 9), cache=model.init_cache(2, 9), n_valid=torch.tensor([9, 4]))
    assert len(dtypes) == 4 and not any(torch.equal(own, own.bfloat16().float()) for own in dtypes)


@every
@pytest.mark.parametrize("fast", [True, False])
def test_no_gradient_flows_through_a_call_with_a_cache(kind, fast):
    """Outside no_grad too: no part of the model is trained by it, on either path."""
    model, x = rat(kind, fast=fast), tokens(2, 10)
    cache = model.init_cache(2, 9)
    for start, end in ((0, 5), (5, 7), (7, 8), (8, 9)):
        logits, loss, _ = model(x[:, start:end], x[:, start + 1:end + 1], cache=cache)
        assert not logits.requires_grad and not loss.requires_grad
    assert not any(buffer.requires_grad for store in cache.layers for buffer in store.values())


@every
def test_a_cache_made_in_inference_mode_serves_outside(kind):
    model, x = rat(kind), tokens(2, 9)
    with torch.inference_mode():
        cache = model.init_cache(2, 9)
        model(x[:, :5], cache=cache)
    got = model(x[:, 5:], cache=cache, n_valid=torch.tensor([4, 0]))[0]
    assert relative(got[0], model(x)[0][0, 5:]) < 1e-10
    cache.reset()


@every
@pytest.mark.parametrize("fast", [True, False])
def test_a_full_row_beside_one_that_goes_on(kind, fast):
    """A chunk and a window longer than the cache: the full row's padding has no slot of its own."""
    model, x = rat(kind, chunk=50, fast=fast), tokens(2, 9)
    cache = model.init_cache(2, 9)
    model(x, cache=cache, n_valid=torch.tensor([9, 4]))
    one = torch.tensor([0, 1])
    got = [model(x[:, t:t + 1], cache=cache, n_valid=one)[0][1] for t in range(4, 8)]
    got.append(model(x[:, 8:].repeat(1, 3), cache=cache, n_valid=one)[0][1, :1])
    assert relative(torch.cat(got), model(x[1:])[0][0, 4:]) < 1e-10


@every
@pytest.mark.parametrize("fast", [True, False])
def test_the_spare_slot_is_never_read(kind, fast, monkeypatch):
    """It holds what padding wrote; here NaN."""
    model = rat(kind, fast=fast)
    init_cache = model.init_cache

    def poisoned(*sizes):
        cache = init_cache(*sizes)
        for store in cache.layers:
            for name in store.keys() & {"k", "v"}:
                store[name][:, :, -1] = math.nan
        return cache
    monkeypatch.setattr(model, "init_cache", poisoned)
    for splits in ([26], [5, 1, 1, 11, 8], [25, 1]):
        assert_cache_is_forward(model, [26, 26], splits, 1e-10)
        assert_cache_is_forward(model, [26, 9], splits, 1e-10)


@pytest.mark.parametrize("kind", ["rat", "attention", "attention-swa", "reversed"])
def test_decoding_reads_keys_contiguous_a_head(kind, monkeypatch):
    strides = []

    def attention_fast(q, k, v, bias):
        strides.extend([k.stride(2), v.stride(2)])
        return model_gpt.attention_fast(q, k, v, bias)
    monkeypatch.setattr(model_rat, "attention_fast", attention_fast)
    model = rat(kind)
    cache = model.init_cache(2, 12)
    model(tokens(2, 9), cache=cache)
    strides.clear()
    model(tokens(2, 1), cache=cache)
    assert len(strides) == 4 and set(strides) == {8}, "the head size"


class Written(torch.Tensor):
    """A buffer that remembers the (row, slot) pairs of each scattered write."""
    pairs = []

    def __setitem__(self, at, value):
        if isinstance(at[0], torch.Tensor):
            rows, slots = torch.broadcast_tensors(at[0], at[2])
            self.pairs.append(list(zip(rows.flatten().tolist(), slots.flatten().tolist())))
        super().__setitem__(at, value)


def test_a_ring_keeps_the_last():
    """Of more new tokens than slots; and no slot but the spare one is written twice at once: on a GPU
    either could win."""
    store = {name: torch.zeros(2, 1, 5, 1).as_subclass(Written) for name in "kv"}
    held = lambda name: store[name][:, 0, :4].flatten(1).tolist()
    x, pos = torch.arange(22.0).view(2, 1, 11, 1), torch.arange(11)
    place = model_rat.Place(pos[None])
    model_rat.write(store, x, x, model_rat.ring_slots(store, place))
    assert held("k") == [[8, 9, 10, 7], [19, 20, 21, 18]]
    ragged = model_rat.Place(torch.tensor([[0], [3]]) + pos, 3, pos < torch.tensor([[11], [6]]))
    model_rat.write(store, x, x, model_rat.ring_slots(store, ragged))
    assert held("v") == [[8, 9, 10, 7], [16, 13, 14, 15]]                   # row 1: 11..16 at 3..8
    pairs = [[pair for pair in pairs if pair[1] < 4] for pairs in Written.pairs]
    assert len(pairs) == 4 and all(len(set(p)) == len(p) == 8 for p in pairs)


def test_decoding_does_not_wait_for_the_device():
    """A token a row, in rows of one length or of several: nothing in the layers asks for values."""
    for kind in KINDS:
        model, x = rat(kind), tokens(2, 20)
        for n_valid in (None, torch.tensor([9, 4])):
            with torch.no_grad():
                cache = model.init_cache(2, 20)
                model(x[:, :9], cache=cache, n_valid=n_valid)
                place = model_rat.with_rotary(model.cfg, cache.place(1), torch.float64)
                h = torch.randn(2, 1, 32, dtype=torch.float64)
                with Largest() as ran:
                    for block, store in zip(model.blocks, cache.layers):
                        h = block(h, place, store)
            assert not ran.names & {"nonzero", "_local_scalar_dense", "item", "masked_select"}, kind


@every
def test_positions_given_to_attend_ascend(kind, monkeypatch):
    monkeypatch.setattr(kernels, "debug", True)
    for splits in ([37], [8, 13, 16], [5, 1, 31]):
        assert_cache_is_forward(rat(kind), [37, 37], splits, 1e-10)
        assert_cache_is_forward(rat(kind), [37, 9, 20], splits, 1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# which code runs, and what it costs

def test_the_path_that_was_asked_for_runs(monkeypatch):
    """Fast, from the first token: kernels.rat; going on: scan, attend, merge; one token: none of them. Naive: none."""
    ran = []
    for name in ("rat", "scan", "attend", "merge"):
        original = getattr(kernels, name)
        spy = lambda *a, name=name, original=original, **k: (ran.append(name), original(*a, **k))[1]
        monkeypatch.setattr(kernels, name, spy)

    def run(model, *pieces, **options):
        ran.clear()
        cache = model.init_cache(2, 40) if pieces[1:] or options else None
        with torch.no_grad():
            for piece in pieces:
                ran.clear()
                model(tokens(2, piece), cache=cache, **options)
        return list(dict.fromkeys(ran))
    assert run(rat(), 20) == ["rat"] and run(rat(), 20, n_valid=torch.tensor([20, 3])) == ["scan", "attend", "merge"]
    assert run(rat(), 7, 9) == ["scan", "attend", "merge"] and run(rat(), 7, 1) == []
    assert run(rat(fast=False), 20) == run(rat(fast=False), 7, 9) == run(rat(fast=False), 7, 1) == []
    assert run(rat("rnn"), 20) == ["scan"] and run(rat("rnn", fast=False), 20) == []
    sdpa = []
    monkeypatch.setattr(model_rat, "attention_fast", lambda *a: (sdpa.append(1), model_gpt.attention_fast(*a))[1])
    assert run(rat("attention"), 20) == [] and len(sdpa) == 2
    assert run(rat("rat-swa"), 20) == ["rat", "attend"] and run(rat("attention-swa", fast=False), 20) == []


@pytest.mark.parametrize("kind", ["rat", "rnn", "attention", "rat-swa", "reversed"])
def test_no_tensor_grows_with_the_square_of_the_length(kind, monkeypatch):
    for name in ("rat", "scan", "attend", "merge"):         # the twins: inside an operator a dispatch mode is blind
        monkeypatch.setattr(kernels, name, getattr(kernels, f"{name}_ref"))
    x = tokens(1, 4097)
    model = rat(kind, chunk=16, n_embd=8, n_head=1)
    with Largest() as largest:
        model(x[:, :-1], x[:, 1:])[1].backward()
    assert 4096 * 61 <= largest.elements <= 2 * 4096 * 61, "the logits, or a piece of 256 rows of scores"


@pytest.mark.parametrize("naive", [False, True])
def test_the_naive_loop_is_linear_in_the_length(naive):
    """Were each step's slice one of autograd's, its gradient would be as long as the sequence: four
    times the work for twice the length."""
    def made(T):
        gate, x = (torch.rand(1, T, 8, requires_grad=True) for _ in range(2))
        with Largest() as largest:
            restart = torch.arange(T)[None] % 4 == 0
            model_rat.running_states(gate, x, restart, None, not naive).sum().backward()
        return largest.total
    assert made(256) < 2.2 * made(128)


@pytest.mark.parametrize("kind", ["rat", "rat-swa", "rnn", "attention", "reversed"])
def test_torch_compile_takes_all_of_it(kind):
    """One graph, the operators in it, for all steps: the trainer compiles where there is a GPU."""
    model, counts = rat(kind), torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    counts.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        model.set_step(step)
        x = tokens(2, 21, seed=step)
        want = outputs_and_gradients(model, x)
        got = outputs_and_gradients(compiled, x)
        grads = {n.removeprefix("_orig_mod."): g for n, g in got[2].items()}
        assert_same((*got[:2], grads), want, all_reached=True)
    assert counts["unique_graphs"] == 1


def test_flops_count_what_is_read():
    T, C = 64, 32
    flops = lambda kind, **sizes: rat(kind, block_size=T, **sizes).flops_per_token()
    weights = lambda kind: sum(p.numel() for n, p in rat(kind).named_parameters() if p.dim() == 2)
    for kind, keys in (("rnn", 0), ("attention", 32.5), ("rat", 7.5 + 1), ("reversed", 2.5)):
        assert flops(kind) == 6 * weights(kind) + 12 * C * 2 * keys, kind
    swa = (sum(range(1, 8)) + 57 * 7) / 64
    assert flops("rat-swa") == 6 * weights("rat-swa") + 12 * C * (8.5 + swa)


# ---------------------------------------------------------------------------------------------------------------------
# parameters and configs

@pytest.mark.parametrize("groups", [1, 2, 4])
def test_parameters_of_a_layer(groups):
    D, d_head = 32, 8
    mix = rat(qk_groups=groups).blocks[0].mix
    count = sum(p.numel() for p in mix.parameters()) + D                                # and its norm
    assert count == 3 * D ** 2 + 2 * groups * d_head * D + D + D ** 2 + D


def test_gate_bias_spreads_memories_over_a_chunk():
    assert not model_rat.initial_gate_bias(5, 2).any() and not model_rat.initial_gate_bias(5, 1).any()
    torch.manual_seed(0)
    u = model_rat.initial_gate_bias(10_000, 16).exp()
    assert 1 <= u.min() < 1.01 and 14.99 < u.max() <= 15 and abs(u.mean() - 8) < 0.1
    model = model_rat.Model(model_rat.Config(chunk=16, block_size=512, n_layer=2, swa=4))
    assert model.blocks[0].mix.gate_bias.exp().max() < 15.01
    assert model_rat.Model(model_rat.Config(mixer="rnn", block_size=512)).blocks[0].mix.gate_bias.exp().max() > 256
    mix = model_rat.Model(model_rat.Config(reversed=True, chunk=64, block_size=256, n_embd=128)).blocks[0].mix
    assert 2.5 < mix.gate_bias.exp().max() < 3.01, "four chunks: four steps"


def test_initial_weights():
    torch.manual_seed(0)
    model = model_rat.Model(model_rat.Config(n_layer=2, n_embd=256, n_head=4, gate_rank=16, swa=4))
    assert all(abs(p.std() / 0.02 - 1) < 0.05 for p in model.parameters() if p.dim() == 2)


@pytest.mark.parametrize("bad, named", [
    (dict(mixer="gru"), "mixer=gru"), (dict(pos="none"), "pos=none"), (dict(mlp="relu"), "mlp=relu"),
    (dict(chunk=-4), "chunk=-4"), (dict(qk_groups=3), "qk_groups=3"), (dict(qk_groups=-2), "qk_groups=-2"),
    (dict(reversed=True, mixer="attention"), "reversed=true"), (dict(swa=-1), "swa"), (dict(gate_rank=-1), "gate_rank"),
    (dict(n_embd=30), "n_embd=30"), (dict(n_embd=12), "even head size"), (dict(n_embd=2056), "head of 256"),
    (dict(norm_eps=0.0), "norm_eps")])
def test_impossible_sizes_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        model_rat.Config(**bad)
    model_rat.Config(n_embd=12, mixer="rnn"), model_rat.Config(n_embd=12, pos="nope")


PAPER = {"rat_200m": 0.2e9, "rat_1300m": 1.3e9, "rat_swa_1300m": 1.3e9}


@pytest.mark.parametrize("name", PAPER)
def test_sizes_of_the_paper(name):
    cfg, sizes, *_ = train.read_config([f"config={ROOT / 'configs' / name}.yaml"])
    vocab = {"gpt2": 50257, "bpe:32000": 32000}[cfg.tokenizer]
    model_cfg = model_rat.Config(**{**sizes, "vocab_size": vocab})
    assert model_cfg.norm_eps == 1e-6
    with torch.device("meta"):
        model = model_rat.Model(model_cfg)
    D, layers = model_cfg.n_embd, model_cfg.n_layer
    rat_layer = 3 * D ** 2 + 2 * 2 * model_cfg.head_dim * D + D + D ** 2 + D
    swa_layer = 4 * D ** 2 + D
    mixers = layers * rat_layer if not model_cfg.swa else layers // 2 * (rat_layer + swa_layer)
    want = mixers + layers * (8 * D ** 2 + D) + D + vocab * D
    assert sum(p.numel() for p in model.parameters()) == want
    assert abs(want / PAPER[name] - 1) < 0.08


def test_the_bench_runs(capsys):
    """Every line of bench.py rat, at tiny sizes on a CPU; and where two lines of logarithms cross."""
    cfg = model_rat.Config(n_embd=16, n_head=2, chunk=4)
    bench.bench_rat(cfg, torch.device("cpu"), lengths=[64, 128], tokens=128, rows=2, rounds=1)
    out = capsys.readouterr().out
    assert out.count("T     128") == 3 and out.count("is faster than attention") == 3 and out.count("T^e") == 2
    assert "attention's is 3.79x RAT(4)'s" in out       # 129 pairs; 33 and the state: each a spare one
    assert bench.crossing([1, 4, 8], [0.5, 2.0, 3.0]) == "from T = 2 on"
    assert bench.crossing([1, 2, 8], [1.5, 0.5, 2.0]) == "from T = 4 on"
    assert bench.crossing([8, 16], [1.5, 2.0]) == "at all of these lengths"
    assert bench.crossing([1, 4], [0.5, 0.9]) == "at none of the longest lengths"
