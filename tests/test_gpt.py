"""The model of `offload train`: its sizes, its positions, what it may see."""

import math

import pytest
import torch
import torch.nn.functional as F

from offload.cli import gpt

SMALL = gpt.Shape(width=128, depth=2)


def randomised(shape=SMALL, recompute=False):
    """A model in which every projection matters: `init` leaves some at zero."""
    torch.manual_seed(0)
    model = gpt.GPT(shape, recompute)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def initialised(seed):
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = gpt.GPT(SMALL).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            gpt.init(module)
    return model


@pytest.mark.parametrize("size", gpt.SIZES)
def test_a_preset_has_the_parameters_of_its_name(size):
    with torch.device("meta"):
        model = gpt.GPT(gpt.SIZES[size])
    count = sum(parameter.numel() for parameter in model.parameters())
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count == pytest.approx(named, rel=0.1)
    assert gpt.SIZES[size].width % gpt.HEAD_WIDTH == 0


def test_it_holds_nothing_but_parameters():
    assert not list(gpt.GPT(SMALL).buffers())


def test_init_fills_every_parameter_and_follows_the_seed():
    first, again, other = (initialised(seed).state_dict() for seed in (1, 1, 2))
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_fresh_model_knows_nothing_but_is_not_sure_of_it():
    tokens = torch.randint(256, (2, 33))
    logits = initialised(0)(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    # Logits of variance one cost half a nat more than equal ones.
    assert loss.item() == pytest.approx(math.log(256) + 0.5, abs=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_shape_and_type_asked_for(dtype):
    logits = randomised().to(dtype)(torch.randint(256, (3, 7)))
    assert logits.shape == (3, 7, 256)
    assert logits.dtype == dtype


def test_no_byte_sees_a_later_one():
    model = randomised()
    tokens = torch.randint(256, (1, 24))
    changed = tokens.clone()
    changed[0, 13] = (changed[0, 13] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :13], after[:, :13], rtol=0, atol=1e-5)
    assert (before[:, 13:] - after[:, 13:]).abs().amax(-1).gt(1e-4).all()


@pytest.mark.parametrize("shift", [1, 17, 200])
def test_rotated_products_depend_on_the_distance_alone(shift):
    query, key = torch.randn(2, 1, 8, gpt.HEAD_WIDTH, dtype=torch.float64)
    rope = gpt.rotations(256, query)
    here = gpt.rotate(query, rope[:, :8]) @ gpt.rotate(key, rope[:, :8]).mT
    there = gpt.rotate(query, rope[:, shift : shift + 8])
    there = there @ gpt.rotate(key, rope[:, shift : shift + 8]).mT
    torch.testing.assert_close(here, there, rtol=0, atol=2e-3)
    unrotated = query @ key.mT
    same = {"dim1": 1, "dim2": 2}
    torch.testing.assert_close(here.diagonal(**same), unrotated.diagonal(**same), rtol=0, atol=1e-4)
    assert not torch.allclose(here, unrotated, atol=0.1)


def test_attention_equals_its_definition():
    attention = randomised().blocks[0].attention
    x = torch.randn(2, 9, SMALL.width)
    rope = gpt.rotations(9, x)
    query, key, value = (
        part.unflatten(-1, (SMALL.heads, gpt.HEAD_WIDTH)).transpose(1, 2)
        for part in attention.qkv(x).chunk(3, dim=-1)
    )
    scores = gpt.rotate(query, rope) @ gpt.rotate(key, rope).mT / math.sqrt(gpt.HEAD_WIDTH)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 9, SMALL.width)
    torch.testing.assert_close(attention(x, rope), attention.out(mixed))


def test_recomputing_changes_no_gradient():
    tokens = torch.randint(256, (2, 16))
    gradients = []
    for recompute in (False, True):
        model = randomised(recompute=recompute)
        model(tokens).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients))


def test_it_learns_a_line_by_heart():
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Shape(width=64, depth=2))
    for module in model.modules():
        gpt.init(module)
    line = torch.frombuffer(bytearray(b"the quick brown fox jumps over"), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        loss = F.cross_entropy(model(line[None, :-1])[0], line[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
