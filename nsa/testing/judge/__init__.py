"""Is a result right? Outputs (`forward`), `gradients`, and which `addresses` a kernel reads and writes."""
