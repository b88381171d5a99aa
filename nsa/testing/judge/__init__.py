"""Is a result right? `forward` checks outputs, `gradients` gradients, `addresses` what a kernel reads and writes.

If a result is wrong, `diagnosis` compares the result with the answers of `counterfactual` and names the mistake.
"""
