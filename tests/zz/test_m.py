from __future__ import annotations
import time, torch, pytest, torch.distributed as dist
from pp_free_warmup.testing._ranks import ranks
from pp_free_warmup.testing._rank_pool import run_on_ranks
from pp_free_warmup.testing.models import Layout, build
def run(layout, steps=3):
    t=time.time(); tr=build(layout); t1=time.time()-t
    t=time.time(); r=[tr.step() for _ in range(steps)]; t2=(time.time()-t)/steps
    return t1,t2,[[round(float(l["lm loss"][0]/l["lm loss"][1]),4) for l in x.losses] for x in r],[round(x.grad_norm,4) for x in r]
L=dict(
 pp2=(2,Layout()), pp2sel=(2,Layout(recompute="selective")), pp2full=(2,Layout(recompute="full")), bf16=(2,Layout(bf16=True)),
 untied=(2,Layout(tied=False)), dealloc=(2,Layout(deallocate=True)), vsl=(2,Layout(variable_seq_lengths=True)), mtp=(2,Layout(mtp=1)),
 frozen=(2,Layout(frozen_stages=(0,))),
 pp4=(4,Layout(pp=4)), vpp=(2,Layout(vp=2)), tp=(4,Layout(tp=2)), dp=(4,Layout(distributed_optimizer=True,overlap_grad_reduce=True,overlap_param_gather=True)),
 moe=(4,Layout(moe=True,ep=2)), moeag=(4,Layout(moe=True,ep=2,dispatcher="allgather")), te=(2,Layout(transformer_impl="local")))
@pytest.mark.parametrize("k",list(L))
def test_x(k):
    n,l=L[k]
    t=time.time(); out=run_on_ranks(run,n,l,timeout=60); 
    print(k, "wall",round(time.time()-t,2),"build %.2f step %.3f"%out[0][:2],"loss",out[-1][2],"norm",out[0][3])
