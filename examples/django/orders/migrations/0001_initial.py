"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The first version of the table, as ``manage.py makemigrations`` made it."""

    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("article", models.CharField(max_length=50)),
                ("count", models.PositiveIntegerField(default=1)),
                ("packed", models.BooleanField(default=False)),
                ("task_id", models.CharField(blank=True, max_length=64)),
            ],
        ),
    )
