"""A Python that has torch and timm, and nothing else of what the project uses."""

import textwrap

# timm itself needs torchvision, huggingface_hub, safetensors, pyyaml; numpy comes with them
ABSENT = ["flwr", "ray", "matplotlib", "jinja2", "psutil", "sklearn", "scipy", "rich", "typer", "pandas", "fontTools"]
ABSENT += ["hypothesis", "cryptography", "Crypto", "pycryptodome"]

BLOCK = textwrap.dedent(f"""
    import importlib.machinery, sys

    find = importlib.machinery.PathFinder.find_spec
    importlib.machinery.PathFinder.find_spec = lambda name, path=None, target=None: (
        None if name.split(".")[0] in {ABSENT!r} else find(name, path, target)
    )
    from server_app.cli.main import main
    sys.exit(main(sys.argv[1:]))
""")
