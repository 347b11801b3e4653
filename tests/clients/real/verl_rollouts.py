"""Made-up rollouts, in the forms in which verl's trainer sends them to its workers."""

from __future__ import annotations

from functools import partial
from typing import Any

PROMPT, RESPONSE, SAMPLES, VOCAB = 6, 10, 8, 64


def made_up(number: int) -> dict[str, Any]:
    """Make up a rollout: prompts padded on the left, responses on the right."""
    import torch

    generator = torch.Generator().manual_seed(number)
    draw = partial(torch.randint, generator=generator)
    prompts, responses = draw(1, VOCAB, (SAMPLES, PROMPT)), draw(1, VOCAB, (SAMPLES, RESPONSE))
    before = torch.arange(PROMPT) >= draw(0, PROMPT - 1, (SAMPLES, 1))
    after = torch.arange(RESPONSE) < draw(3, RESPONSE + 1, (SAMPLES, 1))
    mask = torch.cat([before, after], 1).long()
    return {
        "advantages": torch.rand(SAMPLES, RESPONSE, generator=generator),
        "attention_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1) * mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": prompts,
        "response_mask": after.long(),
        "responses": responses,
        "returns": torch.rand(SAMPLES, RESPONSE, generator=generator),
    }


def batch_of(data: dict[str, Any], **settings: Any) -> Any:
    """Bring a rollout into the form in which verl's trainer sends it to its workers."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    batch = left_right_2_no_padding(tu.get_tensordict(dict(data), non_tensor_dict={"temperature": 1.0}))
    tu.assign_non_tensor(batch, **settings)
    return batch


def for_training(data: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Name what the workers answered as training asks for it, padded; routes as they are."""
    from verl.workers.utils.padding import no_padding_2_padding

    batch, names = batch_of(data), {"log_probs": "old_log_probs", "values": "values"}
    padded = {new: no_padding_2_padding(asked[old], batch).float() for old, new in names.items() if old in asked}
    return {**padded, **{name: asked[name] for name in asked if name == "routed_experts"}}


def shared(value: dict[str, Any]) -> dict[str, Any]:
    """Send what the last stage answered to all, as the controller does."""
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=dist.get_world_size() - 1)
    return box[0]
