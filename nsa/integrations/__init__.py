"""Places where other programs call our kernels by their own names. `import nsa` imports none of them."""
