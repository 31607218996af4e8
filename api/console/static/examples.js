// What "Insert an example" writes.

const json = (value) => JSON.stringify(value, null, 2);

export const EXAMPLES = {
  schema: json({
    type: "object",
    properties: {
      title: { type: "string", maxLength: 60 },
      priority: { enum: ["low", "normal", "high"] },
      tags: { type: "array", items: { type: "string" }, maxItems: 3 },
    },
    required: ["title", "priority", "tags"],
    additionalProperties: false,
  }),
  regex: "[A-Z][a-z]+ (19|20)[0-9]{2}",
  choice: "positive\nneutral\nnegative",
  grammar: 'root ::= "The answer is " ("yes" | "no") "."',
};

export const TOOLS = json([
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  },
]);
