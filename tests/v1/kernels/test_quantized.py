import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_v1.kernels.decoder import row_dtype
from engine_v1.kernels.formats import INT8, Q4_1, Q8_0
from engine_v1.kernels.packed_weights import pack_weights
from engine_v1.kernels.quantize import ZERO_POINT
from engine_v1.kernels.quantized_weights import quantize_weight
from engine_v1.models.gguf_checkpoint import GgufMatrix
from tests.v1.kernels.models import (
    Sequences,
    assert_chunks_change_no_bit,
    assert_same_bits,
    make_decoder,
    make_model,
    reference_logits,
    relative_error,
    run_whole,
)

KINDS = ["int8", "Q8_0", "Q4_1"]
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 64, "num_attention_heads": 4}


def blocks_of(weight, kind):
    """A weight as a GGUF stores it, and the values that stand there."""
    quantized = gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
    values = torch.from_numpy(gguf.dequantize(quantized, gguf.GGMLQuantizationType[kind]))
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    return GgufMatrix(kind, quantized.reshape(len(quantized), -1, block_bytes)), values


def quantize_model(model, kind, vocabulary_kind=None):
    """Let a model's matrices hold what their quantised forms say; return a decoder's arguments."""
    if kind == "int8":
        for weight in [*matrices(model).values(), model.lm_head]:
            values, scales = quantize_weight(weight)
            exact = (torch.from_numpy(values).double() - ZERO_POINT) * torch.from_numpy(scales).double()[:, None]
            weight.copy_(exact)
        return {"weights": pack_weights(model, row_dtype(model.dtype), quantization="int8")}
    blocks = {}
    for name, weight in matrices(model).items():
        blocks[name], values = blocks_of(weight, kind)
        weight.copy_(values)
    name = "model.embed_tokens.weight" if model.lm_head is model.embed else "lm_head.weight"
    blocks[name], values = blocks_of(model.lm_head, vocabulary_kind or kind)
    model.lm_head.copy_(values)
    return {"weights": pack_weights(model, row_dtype(model.dtype), quantization="gguf", blocks=blocks)}


def matrices(model):
    return {
        name: tensor
        for name, tensor in model._named_tensors().items()
        if ".layers." in name and tensor.ndim == 2 and name.endswith("weight")
    }


def rounded_rows(x):
    """Rows with every block of 32 values rounded to 255 steps, as products see them."""
    size = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -size % 32)).unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / torch.where(scales > 0, scales, 1.0)) * scales).flatten(-2)[..., :size]


def distance_to_edge(x):
    """How near each row has a value to where its rounding changes, in steps: float64[rows]."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    steps = blocks / torch.where(scales > 0, scales, 1.0)
    return (steps - steps.floor() - 0.5).abs().flatten(1).amin(1).numpy()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_logits_are_those_of_the_definition(kind, data):
    """Weights as stored, rows rounded in blocks: the logits are the float64 definition's, at any shape."""
    gguf_shapes = kind != "int8"
    sizes = st.sampled_from([32, 64, 96]) if gguf_shapes else st.integers(24, 90)
    kv_heads = data.draw(st.integers(1, 2))
    model = make_model(
        num_hidden_layers=1,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * data.draw(st.sampled_from([1, 3])),
        head_dim=data.draw(st.sampled_from([32, 64] if gguf_shapes else [32, 48, 80])),
        hidden_size=data.draw(sizes),
        intermediate_size=data.draw(sizes),
        vocab_size=data.draw(st.integers(20, 200)),
        tie_word_embeddings=data.draw(st.booleans()),
        qkv_bias=data.draw(st.booleans()),
    )
    vocabulary_kind = data.draw(st.sampled_from(KINDS[1:])) if gguf_shapes else None
    decoder = make_decoder(model, **quantize_model(model, kind, vocabulary_kind))
    sequences, logits = run_whole(decoder, data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    for tokens, rows in zip(sequences.tokens, logits, strict=True):
        edges = []

        def rounded(x, edges=edges):
            edges.append(distance_to_edge(x))
            return rounded_rows(x)

        error = relative_error(rows, reference_logits(model, tokens, rounded=rounded))
        # A value at the edge between two steps may be rounded the other way: 0.004 of its block's largest. Where that
        # is a key or a value, all later rows of the sequence see it.
        in_doubt = np.logical_or.accumulate(np.min(edges, axis=0) < 2e-4)
        assert error[~in_doubt].max(initial=0.0) < 2e-3
        assert error.max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_in_any_batch_and_chunk(kind, dtype):
    """Rows alone, in batches of every size around a tile's, and in chunks: the same logits to the last bit."""
    model = make_model(dtype=dtype, **SHAPE)
    arguments = quantize_model(model, kind)
    lengths = [70, 41, 17]
    _, whole = run_whole(make_decoder(model, **arguments), lengths)
    for chunk in (1, 5, 6, 7, 12, 13, 64):
        decoder = make_decoder(model, **arguments)
        assert_chunks_change_no_bit(decoder, lengths, whole, chunk, end=70 if chunk > 1 else 20)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_arg_max_of_the_logits(kind):
    """The fused arg-max gives the largest logit and its index, for any number of rows."""
    model = make_model(vocab_size=1100, **SHAPE)
    decoder = make_decoder(model, **quantize_model(model, kind))
    logits = run_whole(decoder, [25])[1][0]
    for num_rows in (1, 2, 5, 6, 7, 12, 13, 25):
        ids, values = decoder.greedy(np.arange(num_rows))
        assert ids.tolist() == logits[:num_rows].argmax(1).tolist()
        assert_same_bits(values, logits[:num_rows].max(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_shows_it(kind, value):
    """NaN or an infinity in a token's embedding makes its logits NaN, and those of no other request."""
    model = make_model(**SHAPE)
    arguments = quantize_model(model, kind)
    sequences = Sequences(make_decoder(model, **arguments), [20, 20])
    for tokens in sequences.tokens:
        tokens[tokens == 7] = 8
    clean = sequences.run([(1, 0, 20)])
    sequences.decoder._embed.reshape(-1, 96)[7] = value
    sequences.tokens[0][10] = 7
    logits = sequences.run([(0, 0, 20), (1, 0, 20)])
    best = sequences.decoder.greedy(np.arange(40))[1]
    assert np.isfinite(best[:10]).all()
    assert np.isnan(best[10:20]).all()
    assert_same_bits(logits[20:], clean)


def test_a_row_of_zeros_stays_zero():
    """A block without any value but 0 has no scale to divide by, and gives 0."""
    model = make_model(**SHAPE)
    model.norm.zero_()
    decoder = make_decoder(model, **quantize_model(model, "int8"))
    assert not run_whole(decoder, [9])[1][0].any()


def test_weights_are_rounded_to_the_nearest_of_255_steps():
    """Each output's largest weight is 127 steps, none is off by more than half a step, and zeros stay zeros."""
    weight = torch.tensor([[1.0, -0.5, 0.25, 0.0039], [0.0, 0.0, 0.0, 0.0], [-3.0, 1.5, 0.0, 2.999]])
    values, scales = quantize_weight(weight)
    steps = values.astype(int) - ZERO_POINT
    assert steps[0].tolist() == [127, -64, 32, 0]
    assert steps[1].tolist() == [0, 0, 0, 0]
    assert steps[2].tolist() == [-127, 64, 0, 127]
    assert np.allclose(scales, [1 / 127, 0.0, 3 / 127])


@pytest.mark.parametrize("form, bits", [(INT8, 8), (Q8_0, 8.5), (Q4_1, 5)])
def test_quantised_weights_are_as_small_as_they_should_be(form, bits):
    """A large matrix takes 8 bits a weight, in a GGUF's forms with their scales 8.5 and 5."""
    assert form.size_bytes(1024, 4096) == pytest.approx(1024 * 4096 * bits / 8, rel=2e-3)


@pytest.mark.parametrize(
    "kinds, shape, words",
    [
        (("Q4_1", "Q6_K"), SHAPE, "Q6_K"),
        (("Q5_0", "Q8_0"), SHAPE, "Q5_0"),
        (("Q4_1", "Q8_0"), {**SHAPE, "head_dim": 48, "num_attention_heads": 2}, "heads of a multiple of 32"),
    ],
)
def test_blocks_without_kernels_are_refused(kinds, shape, words):
    """Types of blocks, and heads, that there are no kernels for are named, and so is what to use instead."""
    model = make_model(**shape)
    blocks = {name: GgufMatrix(kinds[0], np.zeros((1, 1, 1), np.uint8)) for name in matrices(model)}
    blocks["lm_head.weight"] = GgufMatrix(kinds[1], np.zeros((1, 1, 1), np.uint8))
    with pytest.raises(ValueError, match=words) as error:
        pack_weights(model, np.dtype(np.float32), quantization="gguf", blocks=blocks)
    assert "int8" in str(error.value)
