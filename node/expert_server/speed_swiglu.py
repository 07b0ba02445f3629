"""The layer program of most models, for measurements and self-tests: SwiGLU, weighted after the FFN."""

SWIGLU_PROGRAM = """swarm-program 1
input row
%0 = matmul ffn_up_exps.weight h
%1 = matmul ffn_gate_exps.weight h
%2 = glu swiglu %1 %0
%3 = matmul ffn_down_exps.weight %2
%4 = mul %3 w
return %4
"""
