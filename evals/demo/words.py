"""The closed lists that the generators draw from.

Nouns, parameter names and enum options are *open* classes: `values.belongs` deals each of them to the
train or to the test split. Verbs, categories of speech and phrases are closed: both splits use all of them.
"""


def listed(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


VERBS: dict[str, tuple[str, ...]] = {
    # the verb in a tool's name -> how a user may say it
    "book": ("book", "reserve"),
    "cancel": ("cancel", "call off"),
    "find": ("find", "look for"),
    "get": ("get", "show me", "tell me"),
    "create": ("create", "make", "set up"),
    "delete": ("delete", "remove"),
    "update": ("update", "change"),
    "send": ("send",),
    "order": ("order", "buy"),
    "rate": ("rate",),
    "track": ("track", "follow"),
    "share": ("share",),
    "rent": ("rent", "hire"),
    "open": ("open",),
    "close": ("close", "shut"),
    "add": ("add",),
    "check": ("check", "verify"),
    "print": ("print",),
    "move": ("move",),
    "pay": ("pay", "settle"),
}

NOUNS = listed(
    """
    account album alarm ambulance apartment appointment archive article auction badge balance ballot
    banner barrel basket bicycle bill blanket boat bond booth bottle bouquet bridge brochure budget
    bundle bus cabin cable cake calendar camera candle canoe canvas card cargo carpet case certificate
    chair channel charter chart clinic clock coat coin collection column comment concert contact
    container contract copy costume coupon course court cradle crane credit crew curtain dashboard deal
    delivery deposit desk device diagram dinner discount document domain donation door drawer drill
    drone echo email engine event exam excursion exhibit expense fabric farm fence ferry festival field
    filter flight flower folder forecast forum fountain frame freight fridge fund garage garden gate
    gift glacier glove goal grant guitar gym hall hammer harbor harvest heater helmet herb hotel house
    image insurance invoice island item jacket job journal journey kayak key kitchen label ladder lamp
    lantern laptop laundry lawn lease lecture lens lesson letter library license lift list loan lobby
    locker log loom lunch machine magazine mail manual map market mask massage meal medal meeting
    membership memo menu message mirror mortgage motor museum newsletter note novel oar offer office
    orchard order oven package paddle page painting parcel parking partner passport patch pavilion
    payment permit phone photo piano picnic pillow pipeline pizza plan plant playlist podcast policy
    pond pool portrait post poster pottery prescription printer profile project pump puppet quilt quiz
    quote racket radio raft rail recipe record refund reminder repair report reservation ribbon ring
    river road robot rocket roof room rope route rug sail salad sandwich sauna scarf scooter screen
    sculpture seat sensor server session shelf shelter shift ship shop shuttle signal sketch ski slide
    snack sofa song speaker spice stadium stage stamp statue storage story studio subscription suitcase
    survey swing table tablet task taxi team telescope temple tent terrace theater ticket tile timer
    tool torch tour toy tractor trail train translation tray trip trophy truck tunnel umbrella uniform
    vaccine valve van vase vehicle venue video villa violin visa visit voucher wagon wallet warehouse
    watch water wedding wheel window workshop yacht yard zoo
    """
)

# parameter names by the kind of value that they hold
PARAMETERS: dict[str, tuple[str, ...]] = {
    "person": listed(
        """
    person guest owner patient recipient client driver host author student teacher visitor member sender
    manager passenger tenant buyer seller winner artist speaker leader nurse sponsor pilot captain
    editor holder contact_name full_name customer_name delegate trainer witness
    """
    ),
    "place": listed(
        """
    city place location town destination origin region venue_city district country village station
    harbor_name departure arrival area branch site warehouse_name street home_town market_town
    pickup_point
    """
    ),
    "date": listed(
        """
    date day start_date end_date due_date arrival_date departure_date deadline birthday release_date
    expiry_date delivery_date check_in check_out issue_date renewal_date visit_date
    """
    ),
    "time": listed(
        """
    time start_time end_time hour opening closing pickup_time arrival_time slot curfew departure_time
    """
    ),
    "integer": listed(
        """
    count quantity guests seats nights limit pages copies days rooms level floor age rating size volume
    width height weight distance duration score minutes depth players tickets rows units bags laps
    points shares doors layers
    """
    ),
    "number": listed(
        """
    price amount budget total cost fee deposit rate temperature balance tip discount ratio speed
    limit_price fine salary tax margin wage premium voltage
    """
    ),
    "code": listed(
        """
    id code number reference order_id ticket_id account_id serial booking_code coupon key room_number
    flight_number tracking_id invoice_id sku plate zone_code member_id case_id badge_number
    """
    ),
    "email": listed("email address contact reply_to cc_email mail inbox backup_mail work_email sender_email"),
    "text": listed(
        """
    title note subject message name label topic comment description reason caption headline query
    keyword theme motto slogan summary heading remark body tagline nickname
    """
    ),
    "enum": listed(
        """
    color priority mode status style format unit category currency language quality shape material
    finish flavor season plan_type tier method grade texture tone theme_color fabric_type roast cut
    """
    ),
    "boolean": listed(
        """
    urgent insured private gift_wrap breakfast express recurring refundable verified public signed
    archived hidden heated fragile pinned muted sealed shared lighted organic
    """
    ),
}

OPTIONS = listed(
    """
    red green blue amber black white silver golden purple orange low normal high critical fast slow eco
    sport draft final active paused oak pine steel glass cotton linen leather matte glossy round square
    oval sweet sour bitter salty spring summer autumn winter basic standard deluxe premium gold platinum
    metric imperial celsius kelvin cash wire cheque daily weekly monthly yearly small medium large tiny
    huge soft hard warm cold mild strong light dark formal casual modern classic rustic plain striped
    dotted smooth rough thin thick narrow wide north south east west front back upper lower
    """
)

TEXT_WORDS = listed(
    """
    quiet morning review team budget summer plan garden party status weekly report first draft harbor
    lights broken lamp second floor new recipe blue whale silent river tax forms winter market open
    stage final call lost keys paper boats city walk early train family dinner project launch old bridge
    late shift fresh bread music night safety check field trip roof repair north wind golden hour green
    tea simple things long road empty chairs happy birthday coffee break data cleanup client visit
    spring sale book club window seat yellow door small steps deep water high tide warm welcome board
    games
    """
)

STARTS = listed("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl st tr sh th")
MIDDLES = listed("a e i o u ai ea io ou")
ENDS = listed("n r l s m t k nd rt x v sh ck")
MAIL_HOSTS = ("example.com", "example.org", "mail.test", "post.example", "inbox.test", "corp.example")
MAKERS = listed("Nova Orbit Pico Terra Volt Aero Luma Hydra Zen Delta Flux Vega")
THINGS = listed("Router Tracker Lamp Speaker Kettle Drone Printer Watch Scale Heater Keyboard Monitor")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OPEN = frozenset((*NOUNS, *PARAMETERS, *OPTIONS, *TEXT_WORDS))  # dealt to the splits
