// What every client is put through; conversation.py beside says it for those in Python.
export const MODEL = "base";
export const QUESTION = "How is the weather in Oslo, and how late is it?";
export const THANKS = "Thanks!";
export const ADDRESS = process.argv[2];

export const FUNCTIONS = {
  get_weather: ({ city }) => `7 degrees in ${city}`,
  get_time: () => "10:15",
};

const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});

export const DECLARED = [
  {
    name: "get_weather",
    description: "Looks up the weather of a city.",
    parameters: object({ city: { type: "string" } }),
    strict: true,
  },
  { name: "get_time", description: "Tells the time.", parameters: object({}), strict: true },
];

export function told(way, calls, texts) {
  console.log(JSON.stringify({ way, calls, texts }));
}
