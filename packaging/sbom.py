"""Software bill of materials of a release in CycloneDX JSON: the crates in the lock files that the program and the extension module use on a
target.

    packaging/sbom.py TARGET > superoffload.cdx.json
"""

import json
import sys

from crates import linked


def main() -> None:
    own, parts, uses = linked(sys.argv[1])
    packages = {package["id"]: package for package in [own, *parts]}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(own, "application")},
        "components": [component(package, "library") for package in parts],
        "dependencies": [{"ref": purl(packages[p]), "dependsOn": sorted(purl(packages[d]) for d in uses[p])} for p in sorted(uses)],
    }
    print(json.dumps(document, indent=1))


def purl(package: dict) -> str:
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package: dict, kind: str) -> dict:
    return {
        "type": kind,
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
        # Crates inside this repository have this repository's licence.
        "licenses": [{"expression": (package["license"] or "MIT OR Apache-2.0").replace("/", " OR ")}],
    }


if __name__ == "__main__":
    main()
