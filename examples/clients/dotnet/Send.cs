// Not tried: written from the documentation of Azure.Messaging.ServiceBus.
// dotnet add package Azure.Messaging.ServiceBus
using System.Text.Json;
using Azure.Messaging.ServiceBus;

static ServiceBusMessage TaskMessage(string task, object[] args, string? id = null)
{
    id ??= Guid.NewGuid().ToString();
    var body = new object[] { args, new Dictionary<string, object>(), new Dictionary<string, object>() };
    return new ServiceBusMessage(JsonSerializer.SerializeToUtf8Bytes(body))
    {
        ContentType = "application/json",
        MessageId = $"{id}:0:0",
        Subject = task,
        ApplicationProperties = { ["task"] = task, ["id"] = id },
    };
}

await using var client = new ServiceBusClient(Environment.GetEnvironmentVariable("AZTASK_BROKER"));
await client.CreateSender("default").SendMessageAsync(TaskMessage("shop.resize", new object[] { "a.png", 200 }));
