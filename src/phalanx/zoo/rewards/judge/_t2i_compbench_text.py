"""The questions of T2I-CompBench++ to ShareGPT4V, by category.

The texts are those of github.com/Karine-Huang/T2I-CompBench (MLLM_eval/ShareGPT4V-CoT_eval/Share_eval.py; MIT licence,
copyright 2023 HKU; see NOTICE), verbatim but for runs of blanks, since changes would change the scores.
"""

ATTRIBUTES = ("color", "shape", "texture")

_ATTRIBUTE = "You are my assistant to identify any objects and their {category} in the image. "
_SPATIAL = "You are my assistant to identify objects and their spatial layout in the image. "
_BRIEFLY = "Briefly describe the image within 50 words"
DESCRIBE = {
    **dict.fromkeys(ATTRIBUTES, _ATTRIBUTE + "Briefly describe what it is in the image within 50 words."),
    **dict.fromkeys(("spatial", "3d_spatial"), f"{_SPATIAL}{_BRIEFLY}."),
    "non_spatial": (
        "You are my assistant to identify the actions, events, objects and their relationships in the image. "
        f"{_BRIEFLY}."
    ),
    "complex": (
        "You are my assistant to evaluate the correspondence of the image to a given text prompt. "
        f"{_BRIEFLY}, focus on the objects in the image and their attributes (such as color, shape, texture), "
        "spatial layout and action relationships."
    ),
    "numeracy": (
        "You are my assistant to identify objects and their quantities in the image. "
        f"{_BRIEFLY}, focus on the objects in the image and their quantity."
    ),
}

_PORTRAYED = (
    'According to the image and your previous answer, evaluate if the text "{prompt}" is correctly portrayed in the '
    "image. "
)
_ALIGNS = (
    "According to the image and your previous answer, evaluate how well the image aligns with the text prompt: "
    '"{prompt}"'
)
_OF_FIVE = "Give a score from 1 to 5, according the criteria: \n"
_FORM = "Provide your analysis and explanation in JSON format with the following keys: score (e.g., {example}), "
_EXPLANATION = "explanation (within 20 words)."
GRADE = {
    **dict.fromkeys(
        ATTRIBUTES,
        "According to the image and your previous answer, evaluate if there is {phrase} in the image. \n "
        "Give a score from 1 to 4, according the criteria:\n "
        "4: there is {noun} in the image, and the {noun} is {attribute}. \n "
        "3: there is {noun} in the image, {noun} is mostly {attribute}. \n "
        "2: there is {noun} in the image, but {noun} is not {attribute}. \n "
        "1: no {noun} in the image. \n " + _FORM.format(example=1) + "\n " + _EXPLANATION,
    ),
    **dict.fromkeys(
        ("spatial", "3d_spatial"),
        _PORTRAYED + "\n " + _OF_FIVE + " "
        "1: image almost irrelevant to the text. \n "
        "2: image not aligned properly with the text. \n "
        "3: spatial layout not aligned properly with the text. \n "
        "4: basically, spatial layout of objects matches the text. \n "
        "5: correct spatial layout in the image for all objects mentioned in the text. \n "
        + _FORM.format(example=2)
        + "\n "
        + _EXPLANATION,
    ),
    "non_spatial": (
        _PORTRAYED + _OF_FIVE + " "
        "5: the image accurately portrayed the actions, events and relationships between objects described in the "
        "text. \n "
        "4: the image portrayed most of the actions, events and relationships but with minor discrepancies. \n "
        "3: the image depicted some elements, but action relationships between objects are not correct. \n "
        "2: the image failed to convey the full scope of the text. \n "
        "1: the image did not depict any actions or events that match the text. \n "
        + _FORM.format(example=2)
        + _EXPLANATION
    ),
    "complex": (
        _ALIGNS + ". " + _OF_FIVE + " "
        "5: the image perfectly matches the content of the text prompt, with no discrepancies. \n "
        "4: the image portrayed most of the actions, events and relationships but with minor discrepancies. \n "
        "3: the image depicted some elements in the text prompt, but ignored some key parts or details. \n "
        "2: the image did not depict any actions or events that match the text. \n "
        "1: the image failed to convey the full scope in the text prompt. \n " + _FORM.format(example=2) + _EXPLANATION
    ),
    "numeracy": (
        _ALIGNS + " " + _OF_FIVE + " "
        "5: correct numerical content in the image for all objects mentioned in the text. \n "
        "4: basically, numerical content of objects matches the text. \n "
        "3: numerical content not aligned properly with the text. \n "
        "2: image not aligned properly with the text. \n "
        "1: image almost irrelevant to the text. \n " + _FORM.format(example=2) + _EXPLANATION
    ),
}
