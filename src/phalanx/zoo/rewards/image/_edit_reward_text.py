"""The texts that EditReward was trained with.

The instructions are data of github.com/TIGER-AI-Lab/EditReward (EditReward/dataset/prompts.py; MIT licence, copyright
2025 TIGER Lab; see NOTICE), verbatim, with the spaces at line ends, since changes would change the scores.
"""

REWARD_TOKEN = "<|Reward|>"

FOLLOWING = (
    "\n"
    "You are tasked with evaluating an edited image **in comparison with the original source image** based on "
    "**Instruction Following & Semantic Fidelity**, and assigning a score from 1 to 4, with 1 being the worst "
    "and 4 being the best.  \n"
    "This dimension focuses on how accurately, completely, and exclusively the model executed the given text "
    "instruction.\n\n"
    "**Inputs Provided:**  \n"
    "- Source Image (before editing)  \n"
    "- Edited Image (after applying the instruction)  \n"
    "- Text Instruction  \n\n"
    "**Sub-Dimensions to Evaluate:**\n\n"
    "- **Semantic Accuracy:**  \n"
    "  Assess whether the edited content accurately captures the semantics of the instruction. The edited "
    'result should precisely match the intended meaning. For example, if the instruction is "replace apples '
    'with oranges," the object must clearly be oranges, not other fruits.\n\n'
    "- **Completeness of Editing:**  \n"
    '  Check whether **all parts** of the instruction are fully executed. For multi-step edits (e.g., "replace '
    'a red car with a blue bicycle"), both the color change and the object replacement must be done without '
    "omissions.\n\n"
    "- **Exclusivity of Edit (No Over-Editing):**  \n"
    "  Ensure that only the requested parts are changed. The rest of the image (as seen in the source) should "
    "remain unaltered. For example, if the instruction only involves replacing an object, the background, "
    "lighting, and unrelated objects should not be unnecessarily modified.\n\n"
    "**Scoring Criteria:**\n"
    "- **4 (Very Good):** Perfectly accurate, complete, and exclusive execution of the instruction.  \n"
    "- **3 (Relatively Good):** Largely correct, but with minor omissions or slight over-editing.  \n"
    "- **2 (Relatively Poor):** Major misinterpretation, incomplete edits, or noticeable unintended changes.  \n"
    "- **1 (Very Poor):** Instruction ignored or completely wrong execution.\n\n"
    "Text instruction - {prompt}\n\n"
    "Please provide the overall ratings of this image: <|Reward|>\n\n"
    "END\n"
)

QUALITY = (
    "\n"
    "You are tasked with evaluating an edited image **in comparison with the original source image** based on "
    "**Visual Quality & Realism**, and assigning a score from 1 to 4, with 1 being the worst and 4 being the "
    "best.  \n"
    "This dimension focuses on how realistic, artifact-free, and aesthetically appealing the edited image is, "
    "while remaining consistent with the source image.\n\n"
    "**Inputs Provided:**  \n"
    "- Source Image (before editing)  \n"
    "- Edited Image (after applying the instruction)  \n"
    "- Text Instruction  \n\n"
    "**Sub-Dimensions to Evaluate:**\n\n"
    "- **Plausibility & Physical Consistency:**  \n"
    "  Check whether the edit aligns with the laws of physics and the scene context. Lighting, shadows, "
    "reflections, perspective, size, and interactions with the environment should all appear natural compared "
    "to the source image.\n\n"
    "- **Artifact-Free Quality:**  \n"
    "  Look for technical flaws such as blur, distortions, pixel misalignment, unnatural textures, or seams "
    "around edited regions. High-quality results should be free from such visible artifacts.\n\n"
    "- **Aesthetic Quality:**  \n"
    "  Evaluate the overall harmony and visual appeal. The image should look natural, balanced, and pleasant. "
    "Colors, composition, and atmosphere should enhance the image rather than degrade it.\n\n"
    "**Scoring Criteria:**\n"
    "- **4 (Very Good):** Perfectly realistic, artifact-free, seamless, and aesthetically pleasing.  \n"
    "- **3 (Relatively Good):** Mostly realistic and clean, with only minor flaws that do not significantly "
    "distract.  \n"
    "- **2 (Relatively Poor):** Noticeable physical inconsistencies or visible artifacts that make the edit "
    "unnatural.  \n"
    "- **1 (Very Poor):** Severe artifacts, incoherent composition, or visually unusable result.\n\n"
    "Text instruction - {prompt}\n\n"
    "Please provide the overall ratings of this image: <|Reward|>\n\n"
    "END\n"
)
