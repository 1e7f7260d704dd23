// Not tried: written from the documentation of com.azure:azure-messaging-servicebus.
import com.azure.core.util.BinaryData;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import java.util.List;
import java.util.Map;
import java.util.UUID;

public final class Send {
    static ServiceBusMessage taskMessage(String task, List<?> arguments, String id) {
        var message = new ServiceBusMessage(BinaryData.fromObject(List.of(arguments, Map.of(), Map.of())));
        message.setContentType("application/json").setMessageId(id + ":0:0").setSubject(task);
        message.getApplicationProperties().put("task", task);
        message.getApplicationProperties().put("id", id);
        return message;
    }

    public static void main(String[] given) {
        try (var sender = new ServiceBusClientBuilder()
                .connectionString(System.getenv("AZTASK_BROKER"))
                .sender().queueName("default").buildClient()) {
            sender.sendMessage(taskMessage("shop.resize", List.of("a.png", 200), UUID.randomUUID().toString()));
        }
    }
}
