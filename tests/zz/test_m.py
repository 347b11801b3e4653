from __future__ import annotations
import time, torch, pytest, torch.distributed as dist
from pp_free_warmup.testing import ranks, run_on_ranks, assert_leaves_no_trace
from pp_free_warmup.testing.models import Layout, build
from pp_free_warmup.testing._trace import observed
def run(layout, opt):
    tr=build(layout); 
    t=time.time(); w=observed(tr.chunks, tr.optimizer); t=time.time()-t
    with assert_leaves_no_trace(tr.chunks, tr.optimizer): pass
    msg=""
    try:
        with assert_leaves_no_trace(tr.chunks, tr.optimizer):
            for _ in range(2):
                if opt: tr.step()
                else:
                    from megatron.core.pipeline_parallel import get_forward_backward_func
                    get_forward_backward_func()(**tr.schedule_arguments())
    except AssertionError as e: msg=str(e)
    return t, len(w.fields), msg
@pytest.mark.parametrize("opt",[False,True])
@pytest.mark.parametrize("l",[(2,Layout(mtp=1)),(4,Layout(moe=True,ep=2,distributed_optimizer=True,overlap_grad_reduce=True,overlap_param_gather=True))])
def test_x(l, opt):
    out=run_on_ranks(run,l[0],l[1],opt,timeout=60)
    for o in out[::l[0]-1]: print(o[:2]); print("\n".join(x[:190] for x in o[2].splitlines() if not x.split(":")[0].endswith(("main_grad", "weight","bias"))))
