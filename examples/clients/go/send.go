// Not tried: written from the documentation of azservicebus.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/google/uuid"
)

func taskMessage(task string, args []any, id string) (*azservicebus.Message, error) {
	body, err := json.Marshal([]any{args, map[string]any{}, map[string]any{}})
	if err != nil {
		return nil, err
	}
	contentType, messageID := "application/json", id+":0:0"
	return &azservicebus.Message{
		Body: body, ContentType: &contentType, MessageID: &messageID, Subject: &task,
		ApplicationProperties: map[string]any{"task": task, "id": id},
	}, nil
}

func main() {
	ctx := context.Background()
	client, err := azservicebus.NewClientFromConnectionString(os.Getenv("AZTASK_BROKER"), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close(ctx)
	sender, err := client.NewSender("default", nil)
	if err != nil {
		log.Fatal(err)
	}
	message, err := taskMessage("shop.resize", []any{"a.png", 200}, uuid.NewString())
	if err != nil {
		log.Fatal(err)
	}
	if err := sender.SendMessage(ctx, message, nil); err != nil {
		log.Fatal(err)
	}
}
