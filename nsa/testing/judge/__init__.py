"""Is a result right? Outputs (`forward`), `gradients`, and which `addresses` a kernel reads and writes.

If it is not, what is it instead? `diagnosis`, which compares with answers of `counterfactual` by `evidence`.
"""
