"""A server of NeMo-Gym that counts letters: two rewards for the last turn of an episode."""

from typing import Any

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)


class LettersResponse(BaseVerifyResponse):
    reward_components: dict[str, float]
    mask_sample: bool


class Letters(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: BaseVerifyRequest) -> LettersResponse:
        said = [item for item in body.response.output if item.type == "message" and item.role == "assistant"]
        text = said[-1].content[0].text if said and said[-1].content else ""
        rewards = {"vowels": sum(map(text.count, "aeiou")) / 10, "spaces": text.count(" ") / 10}
        told: dict[str, Any] = body.model_dump()
        asked = str(told["responses_create_params"]["input"])
        return LettersResponse(
            **told, reward=sum(rewards.values()), reward_components=rewards, mask_sample="nothing" in asked
        )


if __name__ == "__main__":
    Letters.run_webserver()
