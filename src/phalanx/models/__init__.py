"""Model families, a file each (`Model`), and the policy that is made of one (flow.py)."""
